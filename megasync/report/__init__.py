"""Logs, metrics, progress and the report of a run.

log.py           metrics.jsonl, samples.jsonl, summary.json
progress.py      the line on the terminal
loggers.py       TensorBoard, W&B, trackio, and the user's own
callbacks.py     the user's own functions, called after each step
timeline.py      the Chrome trace
registry.py      names, units and meanings of all metrics
learning.py      whether a run has learned: each figure rose, was flat or fell, with its standard error
signs.py         signs of trouble in the metrics, as pure functions
advisories.py    conditions that users should look at, with remedies
html/            the parts of the report
page.py          one run or several as one HTML file
watch.py         serves the report while the run is active
"""
