"""The report's page, piece by piece: a run's files become HTML and the data that a script in it draws.

record.py    what a run's folder holds
curves.py    metrics as charts in groups, and what does not vary as numbers
lanes.py     where the wall time went; spans of the last steps, trainer and replicas as lanes
samples.py   prompts and responses, episodes as turns, with what there is of each token
sections.py  tiles, advisories, plan against actual, configuration
style.py     the page's CSS, light and dark
script.py    the page's JavaScript
"""
