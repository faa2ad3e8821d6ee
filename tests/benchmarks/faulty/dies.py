import os


def measure(machine, report):
    report.add(found=1)
    os._exit(3)
