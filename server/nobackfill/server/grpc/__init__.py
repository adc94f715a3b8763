"""Calls: who may, how many at a time, for how long, with which errors and figures."""
