"""What a run writes down and shows.

log.py           metrics.jsonl, samples.jsonl, summary.json
loggers.py       TensorBoard, W&B, trackio
timeline.py      the Chrome trace
progress.py      the line on the terminal
metric_names.py  names, units and meanings of all metrics
advisories.py    conditions of a run that call for a look, as pure functions
page.py          a run as one HTML file
"""
