"""Writes a run's report.html, or serves it while the run is active: `megasync report`.

command.py  the command
"""
