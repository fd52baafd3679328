"""Targets of several teachers as one."""
