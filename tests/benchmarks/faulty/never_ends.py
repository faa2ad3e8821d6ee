import os
import subprocess
import sys
import time
from pathlib import Path


def measure(machine, report):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    report.add(found=1, processes=[os.getpid(), helper.pid])
    for file in machine.models:
        Path(file).write_text(str(os.getpid()))
    while True:
        time.sleep(60)
