"""Write the table of rational fits, methods/rational/fits.json: `python tools/fit_rational.py`, half a minute."""

import itertools
import json
from dataclasses import astuple

from nonlinear_lowrank.methods.rational.fit import KINDS, TABLE, solve
from nonlinear_lowrank.methods.rational.op import FORMS

rows = [
    json.dumps(astuple(solve(kind, form, (5, 4), (-size, size))))
    for size, kind, form in itertools.product((3.0, 10.0), KINDS, FORMS)
]
TABLE.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
