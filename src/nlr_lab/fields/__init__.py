"""Coordinate networks: images, shapes and scenes as functions, dense, low-rank or sine low-rank.

A *problem* (`fields.problem`) says what is fitted and how it is judged; `fields.fit` fits it.
"""
