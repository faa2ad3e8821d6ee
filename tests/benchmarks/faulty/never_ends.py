import os
import subprocess
import sys
import time


def measure(machine, report):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report.add(found=1, processes=[os.getpid(), helper.pid])
    while True:
        time.sleep(60)
