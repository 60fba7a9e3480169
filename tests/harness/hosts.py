"""Several "hosts" on one machine: each has its own network, processes, hostname and /dev/shm; a bridge connects them.

A host is a set of Linux namespaces held by one process, their init: when it is killed, the kernel ends every process
of the host and removes its network, so nothing is left however a test ends. No packet leaves the namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.warm_python import Python

__all__ = ["Hosts", "WarmHosts", "why_not"]

_NETWORK = "10.77.0"
_REPOSITORY = Path(__file__).parents[2]


def why_not() -> str:
    """Why this machine cannot make hosts; empty if it can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs the tools {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    try:
        Hosts(1).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network or pid namespaces, veth or a bridge are not allowed here: {error}"
    return ""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Hosts:
    """``count`` hosts with addresses 10.77.0.1, ...; a context manager.

    ``racks``: by host, the rack that it is in; each rack has a switch, which is joined to that of all.
    """

    def __init__(self, count: int, racks: Sequence[int] | None = None) -> None:
        self._racks = racks
        self._holders: list[subprocess.Popen[bytes]] = []
        self._inits: list[int] = []
        self._running: list[subprocess.Popen[str] | Python] = []
        try:
            for index in range(count + 1):  # the last one is the switch
                self._hold(f"host{index}")
            self._connect(count)
        except BaseException:
            self.close()
            raise

    def _hold(self, name: str) -> None:
        setup = f"hostname {name} && mount -t tmpfs none /dev/shm && echo ready && exec sleep infinity"
        holder = subprocess.Popen(
            ["unshare", "-n", "-p", "-f", "-m", "-u", "-i", "--mount-proc", "--kill-child", "sh", "-c", setup],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise OSError(f"{name} did not come up")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        self._inits.append(int(children[0]))

    def _connect(self, count: int) -> None:
        switch = self._inits[-1]
        self._ip(switch, "link add bridge0 type bridge")
        self._ip(switch, "link set bridge0 up")
        for rack in sorted(set(self._racks or ())):
            self._ip(switch, f"link add rack{rack} type bridge")
            self._ip(switch, f"link add up{rack} type veth peer name down{rack}")
            for link, end in ((f"up{rack}", f"rack{rack}"), (f"down{rack}", "bridge0")):
                self._ip(switch, f"link set {link} master {end} up")
            self._ip(switch, f"link set rack{rack} up")
        for index in range(count):
            host = self._inits[index]
            self._ip(switch, f"link add port{index} type veth peer name eth0 netns {host}")
            bridge = "bridge0" if self._racks is None else f"rack{self._racks[index]}"
            self._ip(switch, f"link set port{index} master {bridge} up")
            self._ip(host, f"addr add {self.address(index)}/24 dev eth0")
            self._ip(host, "link set lo up")
            self._ip(host, "link set eth0 up")

    @staticmethod
    def _ip(init: int, command: str) -> None:
        subprocess.run(
            ["nsenter", "-t", str(init), "-n", "ip", *command.split()], check=True, capture_output=True, timeout=10
        )

    @staticmethod
    def address(index: int) -> str:
        """The address of a host."""
        return f"{_NETWORK}.{index + 1}"

    def limit(self, mbit: int) -> None:
        """Every host sends and gets at most so many Mbit/s from now on, by a token bucket at both ends of its link."""
        bucket = f"root tbf rate {mbit}mbit burst 128kb latency 50ms"
        for index, init in enumerate(self._inits[:-1]):
            self._tc(init, f"qdisc add dev eth0 {bucket}")
            self._tc(self._inits[-1], f"qdisc add dev port{index} {bucket}")

    def limit_host(self, index: int, mbit: int | None) -> None:
        """The host sends at most so many Mbit/s from now on; ``None``: any number again."""
        change = (
            "del dev eth0 root" if mbit is None else f"add dev eth0 root tbf rate {mbit}mbit burst 128kb latency 50ms"
        )
        self._tc(self._inits[index], f"qdisc {change}")

    def limit_racks(self, mbit: int) -> None:
        """Every rack sends to others and gets from them at most so many Mbit/s from now on."""
        bucket = f"root tbf rate {mbit}mbit burst 128kb latency 50ms"
        for rack in sorted(set(self._racks or ())):
            for end in ("up", "down"):
                self._tc(self._inits[-1], f"qdisc add dev {end}{rack} {bucket}")

    @staticmethod
    def _tc(init: int, command: str) -> None:
        subprocess.run(
            ["nsenter", "-t", str(init), "-n", "tc", *command.split()], check=True, capture_output=True, timeout=10
        )

    def cut(self, index: int) -> None:
        """Takes the host's link down at the switch: its packets vanish, its processes run on."""
        self._ip(self._inits[-1], f"link set port{index} down")

    def wire_bytes(self, index: int) -> int:
        """Bytes that the host has sent over its link since it came up, with all headers."""
        text = subprocess.run(
            ["nsenter", "-t", str(self._inits[index]), "-n", "cat", "/proc/net/dev"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        fields = next(line for line in text.splitlines() if "eth0" in line).split(":")[1].split()
        return int(fields[8])

    def start(
        self, index: int, command: Sequence[str], environment: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        """Starts a command on a host; its output is captured."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HDPCOMM_", "RANK"))}
        inherited |= {"PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}
        place = cwd or _REPOSITORY
        self._running.append(self._started(self._inits[index], command, inherited | (environment or {}), place))

    def _started(
        self, init: int, command: Sequence[str], environment: dict[str, str], cwd: Path
    ) -> subprocess.Popen[str] | Python:
        return subprocess.Popen(
            ["nsenter", "-t", str(init), "-n", "-p", "-m", "-u", "-i", f"--wd={cwd}", *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ranks(self, program: Sequence[str], world: Sequence[int], environment: dict[str, str] | None = None) -> None:
        """Starts one process a host; it forks a rank for each r with ``world[r]`` equal to the host."""
        for host in sorted(set(world)):
            own = {
                "HOST_RANKS": " ".join(str(rank) for rank, where in enumerate(world) if where == host),
                "WORLD_SIZE": str(len(world)),
                "LOCAL_WORLD_SIZE": str(list(world).count(host)),
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": "29400",
            }
            self.start(host, [sys.executable, "-m", *program], own | (environment or {}))

    def torchrun(self, program: Sequence[str], per_host: int, environment: dict[str, str] | None = None) -> None:
        """Starts ``torchrun`` on every host."""
        count = len(self._inits) - 1
        for index in range(count):
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                str(count),
                "--node-rank",
                str(index),
            ]
            launcher += ["--nproc-per-node", str(per_host), "--master-addr", self.address(0), "--master-port", "29400"]
            self.start(index, [*launcher, "-m", *program], environment)

    def finish(self, timeout: float) -> list[str]:
        """Waits for all that was started; returns what each printed. Fails with it when one did not succeed."""
        deadline = time.monotonic() + timeout
        outputs = []
        for process in self._running:
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{process.args} did not end within {timeout} s") from None
            outputs.append(output)
        failed = [output for process, output in zip(self._running, outputs, strict=True) if process.returncode]
        assert not failed, "\n---\n".join(failed)
        self._running = []
        return outputs

    def close(self) -> None:
        """Ends the hosts and everything on them."""
        for init in self._inits:
            os.kill(init, signal.SIGKILL)  # the init of its pid namespace: all its processes go with it
        for holder in self._holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
        for process in self._running:
            process.kill()
            process.communicate(timeout=60)
        self._holders, self._inits, self._running = [], [], []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WarmHosts(Hosts):
    """Python programs have imported torch when they start; ranks that torchrun starts have not."""

    def _started(
        self, init: int, command: Sequence[str], environment: dict[str, str], cwd: Path
    ) -> subprocess.Popen[str] | Python:
        if command[0] != sys.executable:
            return super()._started(init, command, environment, cwd)
        return Python(command[1:], env=environment, cwd=cwd, merged=True, namespaces_of=init)
