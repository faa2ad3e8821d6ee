def measure(machine, report):
    report.add(found=1)
    raise ArithmeticError("a sum does not add up")
