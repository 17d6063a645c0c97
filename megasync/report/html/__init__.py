"""The report's page: a run's files become figures, rows and curves as data; page.html renders them with report.css and report.js.

record.py   the files of a run's folder
figures.py  headline figures, configuration
curves.py   metrics as charts in groups; a metric that does not vary as a number
phases.py   where the wall time went; the timeline of the last steps
samples.py  prompts, responses and episodes with their tokens
"""
