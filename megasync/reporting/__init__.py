"""What a run writes down and shows.

log.py        metrics.jsonl, TensorBoard, summary.json
page.py       a run as one HTML file
timeline.py   the Chrome trace
progress.py   the line on the terminal
"""
