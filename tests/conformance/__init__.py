"""Inputs drawn from public bug reports about attention kernels, with the right answers.

    cases_open.jsonl   the cases as they came: shapes, inputs, and the answer as NumPy formulas
    cases.py           reads them: one `Case` for every case and variant, and its arrays
    expected.py        the right answer, by evaluating a case's own formulas
    specs.py           each numeric case as `.attn` text, with the tensors and numbers it takes

A test of anything that runs attention loops over `numeric_cases()`, builds `source(case)` and
`arguments(case, inputs)`, and compares with `expected(case, inputs)` at `case.tolerance`.
"""
