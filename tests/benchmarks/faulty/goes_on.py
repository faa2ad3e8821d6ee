def measure(machine, report):
    report.attempt("broken", lambda: 1 / 0)
    report.attempt("whole", lambda: {"number": float("nan")})
