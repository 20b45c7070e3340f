"""Suites of runs on one machine or many, and the hyper-parameter search on top of them."""
