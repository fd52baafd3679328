"""Teacher records of other tools: read into a sealed cache of profile topk, and written out of any
cache.
"""
