"""Kernels that are forks of Sphinx, which has imported torch: a page begins seconds earlier."""

import asyncio
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings

from docutils import nodes
from jupyter_client.provisioning import local_provisioner

PLACE = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w{8}/")  # where a page is run


class Fork:
    """A child process, with the methods of ``subprocess.Popen`` that a kernel's manager calls."""

    stdin = stdout = stderr = None

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def launch(command, env=None, cwd=None, **streams):
    """Start a kernel in the place of ``launch_kernel`` of jupyter_client."""
    sys.stdout.flush()
    pid = os.fork()
    os.setpgid(pid, pid or os.getpid())  # in both, before the manager asks which group it signals
    if pid:
        return Fork(pid)
    try:
        _be_a_kernel(command[command.index("-f") + 1], env, cwd)
    finally:
        os._exit(0)


def _be_a_kernel(connection, env, cwd):
    signal.set_wakeup_fd(-1)  # or the loop of the parent would see this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(cwd or os.getcwd())
    os.environ |= {**(env or {}), "JPY_PARENT_PID": str(os.getppid())}  # it ends with its parent
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    sys.path.insert(0, "")
    warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, which other packages import
    for logger in (logging.getLogger(), logging.getLogger("sphinx")):
        logger.handlers.clear()
    asyncio._set_running_loop(None)  # that of the parent
    asyncio.set_event_loop(asyncio.new_event_loop())

    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(argv=["-f", connection])


def shorten_paths(app, doctree):
    """Show the paths in what a page prints as a reader sees them: relative to the page's folder."""
    for node in doctree.findall(lambda node: isinstance(node, nodes.literal_block | nodes.raw)):
        text = PLACE.sub("", node.astext())
        if text != node.astext():
            node.rawsource, node.children = text, [nodes.Text(text)]


def setup(app):
    local_provisioner.launch_kernel = launch
    app.connect("doctree-read", shorten_paths)
