"""What a run writes down and shows.

log.py           metrics.jsonl, samples.jsonl, summary.json
progress.py      the line on the terminal
loggers.py       TensorBoard, W&B, trackio
timeline.py      the Chrome trace
metric_names.py  names, units and meanings of all metrics
learning.py      whether a run has learned: rose, flat or fell, with the error
signs.py         what metrics say is going wrong, as pure functions
advisories.py    conditions of a run that call for a look, and what to try
reference.py     docs/metrics.md
html/            the pieces of the report
page.py          a run, or several, as one HTML file
watch.py         serves it while the run goes on
"""
