"""x"""
from megasync.planning.make import Plan
def nearest(plan: Plan) -> str: return ""
def suggest(plan: Plan) -> str: return ""
