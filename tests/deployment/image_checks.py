"""`make image-test`: images are really built, and each command is run as in a pod. Not part of `make test`: it needs root,
buildah, runc and debootstrap (Debian's packages of these names) and takes minutes.

No registry of images is needed: a Debian made by debootstrap stands for the base that the Dockerfile pins.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas_cli.app import COMMANDS
from tests.deployment.tools import ROOT
from tests.eventually import until_sync

BASE = "localhost/kvatlas-test-base"
IMAGES = ["kvatlas", "kvatlas-sidecar", "kvatlas-simulator"]
MOST_OVER_BASE_MIB = {"kvatlas-sidecar": 95, "kvatlas": 180, "kvatlas-simulator": 250}
MEMORY_LIMIT = 512 << 20
"""The smallest limit that a manifest sets for a container of ours."""
MIB = 1 << 20

pytestmark = pytest.mark.timeout(1800)


def output(*words: str, **variables: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def make_base() -> None:
    """Make a Debian with Python, and with this machine's access to the package index."""
    if subprocess.run(["buildah", "inspect", "--type=image", BASE], capture_output=True, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        output(
            "debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", str(root)
        )
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / waste)
        shutil.rmtree(root / "etc/ssl/certs")  # its links point to files of this machine
        shutil.copytree("/etc/ssl/certs", root / "etc/ssl/certs", ignore_dangling_symlinks=True)
        if Path("/etc/pip.conf").exists():
            shutil.copy("/etc/pip.conf", root / "etc/pip.conf")
        container = output("buildah", "from", "scratch").strip()
        output("buildah", "add", "--quiet", container, str(root), "/")
        output("buildah", "commit", "--quiet", "--rm", container, BASE)


@dataclass(frozen=True, slots=True)
class Image:
    """A built image, mounted."""

    name: str
    root: Path
    config: dict[str, Any]
    bytes_over_base: int


@pytest.fixture(scope="session")
def images() -> Iterator[dict[str, Image]]:
    for program in ("buildah", "runc", "debootstrap"):
        assert shutil.which(program), f"make image-test needs {program}: apt-get install buildah runc debootstrap"
    assert os.geteuid() == 0, "make image-test needs root"
    make_base()
    output(
        "make", "--directory", str(ROOT), "image", "TOOL=buildah", f"BUILD_FLAGS=--layers --build-arg BASE={BASE}", "REGISTRY=",
        BUILDAH_ISOLATION="chroot",
    )  # fmt: skip
    version = output("make", "--directory", str(ROOT), "--silent", "version").strip()
    with contextlib.ExitStack() as stack:
        base = size_of(mounted(stack, BASE))
        built = {}
        for name in IMAGES:
            root = mounted(stack, f"localhost/{name}:{version}")
            inspected = json.loads(output("buildah", "inspect", "--type=image", f"localhost/{name}:{version}"))
            built[name] = Image(name, root, inspected["OCIv1"]["config"], size_of(root) - base)
        yield built


def mounted(stack: contextlib.ExitStack, image: str) -> Path:
    container = output("buildah", "from", "--pull-never", image).strip()
    stack.callback(output, "buildah", "rm", container)
    return Path(output("buildah", "mount", container).strip())


def size_of(root: Path) -> int:
    return int(output("du", "--summarize", "--block-size=1", "--one-file-system", str(root)).split()[0])


@dataclass(slots=True)
class Container:
    """A command in an image: read-only root, no capabilities or way to gain any, not as root; on this machine's loopback."""

    image: Image
    words: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] = ()
    name: str = field(default_factory=lambda: f"kvatlas-{uuid.uuid4().hex[:12]}")

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        with tempfile.TemporaryDirectory() as bundle:
            output("runc", "spec", "--bundle", bundle)
            file = Path(bundle) / "config.json"
            spec = json.loads(file.read_text())
            uid, gid = (int(part) for part in self.image.config["User"].split(":"))
            environment = [*self.image.config["Env"], *(f"{key}={value}" for key, value in self.variables.items())]
            spec["root"] = {"path": str(self.image.root), "readonly": True}
            spec["process"] |= {
                "terminal": False,
                "user": {"uid": uid, "gid": gid},
                "args": [*(self.entrypoint or self.image.config["Entrypoint"]), *self.words],
                "env": environment,
                "cwd": self.image.config["WorkingDir"],
                "capabilities": {},
                "noNewPrivileges": True,
            }
            spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] != "network"]
            spec["linux"]["resources"] = {"memory": {"limit": MEMORY_LIMIT}, "pids": {"limit": 256}}
            spec["mounts"] += [
                {
                    "destination": "/var/lib/kvatlas",
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": ["nosuid", "nodev", f"uid={uid}", f"gid={gid}", "size=64m"],
                }
            ]
            file.write_text(json.dumps(spec))
            process = subprocess.Popen(
                ["runc", "run", "--bundle", bundle, self.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                yield process
            finally:
                subprocess.run(["runc", "kill", self.name, "KILL"], capture_output=True, check=False)
                process.communicate(timeout=30)
                subprocess.run(["runc", "delete", "--force", self.name], capture_output=True, check=False)

    def run(self) -> str:
        """Return what it prints until it ends on its own with exit code 0."""
        with self.started() as process:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said
            return said

    @contextlib.contextmanager
    def serving(self, ready: str) -> Iterator["Container"]:
        """Run it from the line that contains `ready` to a clean end on SIGTERM."""
        with self.started() as process:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if ready in line:
                    break
            else:
                raise AssertionError("".join(said))
            try:
                yield self
            finally:
                output("runc", "kill", self.name, signal.Signals.SIGTERM.name)
                rest, _ = process.communicate(timeout=60)
            assert process.returncode == 0 and "Traceback" not in rest, rest


def python(image: Image, code: str) -> str:
    return Container(image, ["-c", code], entrypoint=["python3"]).run()


@pytest.mark.parametrize("name", IMAGES)
def test_it_is_small(images: dict[str, Image], name: str) -> None:
    over = images[name].bytes_over_base / MIB
    print(f"{name}: {over:.0f} MiB over its base")
    assert over <= MOST_OVER_BASE_MIB[name]


@pytest.mark.parametrize("name", IMAGES)
def test_it_says_what_it_is_and_runs_as_nobody_in_particular(images: dict[str, Image], name: str) -> None:
    config = images[name].config
    assert config["User"] == "10001:10001" and config["Entrypoint"] == ["kvatlas"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == output("make", "--silent", "-C", str(ROOT), "version").strip()
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert labels["org.opencontainers.image.revision"] == output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    assert "PIP_" not in str(config["Env"])
    found = output(
        "find", str(images[name].root / "opt"), "(", "-uid", "10001", "-o", "-perm", "/o+w", ")", "!", "-type", "l"
    )
    assert found == "", "nothing of the program may be written by it"


@pytest.mark.parametrize("name", IMAGES)
def test_it_can_install_nothing(images: dict[str, Image], name: str) -> None:
    code = "import importlib.util as u; print([m for m in ('pip', 'setuptools', 'wheel') if u.find_spec(m)])"
    assert python(images[name], code) == "[]\n"


def test_only_the_simulator_draws(images: dict[str, Image]) -> None:
    code = "import importlib.util as u; print([m for m in ('matplotlib', 'numpy', 'nats', 'zmq') if u.find_spec(m)])"
    assert python(images["kvatlas-sidecar"], code) == "['nats', 'zmq']\n"
    assert python(images["kvatlas"], code) == "['nats', 'zmq']\n"
    assert python(images["kvatlas-simulator"], code) == "['matplotlib', 'numpy', 'zmq']\n"


@pytest.mark.parametrize("name", IMAGES)
def test_its_bill_of_materials_lists_every_package(images: dict[str, Image], name: str) -> None:
    image = images[name]
    bill = json.loads((image.root / image.config["Labels"]["com.kvatlas.sbom"].lstrip("/")).read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {f"{one['name']}=={one['version']}" for one in [*bill["components"], bill["metadata"]["component"]]}
    code = "import importlib.metadata as m; print(*(f\"{d.metadata['Name']}=={d.version}\" for d in m.distributions()))"
    assert {one for one in python(image, code).split() if "kvatlas" not in one} <= listed
    assert any(one.startswith("kvatlas==") for one in listed)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_starts(images: dict[str, Image], command: str) -> None:
    assert f"Usage: kvatlas {command}" in Container(images["kvatlas"], [command, "--help"]).run()


def test_a_fleet_of_containers_serves_a_request(images: dict[str, Image]) -> None:
    http, events, replay, router, status = (free_port() for _ in range(5))
    with NatsProcess() as nats, ValkeyProcess() as valkey, contextlib.ExitStack() as stack:
        servers = {"KVATLAS_NATS_URL": nats.url, "KVATLAS_REDIS_URL": valkey.url}
        metrics = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1"}
        service, sidecar = images["kvatlas"], images["kvatlas-sidecar"]
        stack.enter_context(
            Container(
                images["kvatlas-simulator"],
                ["simulate-engine", "--model=demo", f"--port={http}", f"--endpoint=tcp://127.0.0.1:{events}",
                 f"--replay-endpoint=tcp://127.0.0.1:{replay}"],
            ).serving("engine at")
        )  # fmt: skip
        pages = {"indexer": free_port(), "publish": free_port(), "router": free_port()}
        for image, words, ready in (
            (service, ["indexer", "--member-id=i"], "is ready"),
            (
                sidecar,
                ["publish", "--engine=vllm", "--worker-id=w.1", "--model-id=demo", "--state-dir=/var/lib/kvatlas",
                 f"--endpoint=tcp://127.0.0.1:{events}", f"--replay-endpoint=tcp://127.0.0.1:{replay}",
                 f"--engine-url=http://127.0.0.1:{http}", f"--status-port={status}"],
                "is published",
            ),
            (service, ["router", f"--port={router}"], "router at"),
        ):  # fmt: skip
            page = {"OTEL_EXPORTER_PROMETHEUS_PORT": str(pages[words[0]])}
            container = Container(image, words, {**servers, **metrics, **page})
            stack.enter_context(container.serving(ready))
            if words[0] == "publish":
                drained = container

        def cached() -> int:
            body = {"model": "demo", "prompt": list(range(200)), "max_tokens": 2}
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"http://127.0.0.1:{router}/v1/completions", json=body, timeout=30)
                if answer.status_code == 200:
                    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            return 0

        assert until_sync(cached, what="a cached prefix") >= 192
        for port in pages.values():
            assert "\nkvatlas_" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
        assert httpx.get(f"http://127.0.0.1:{status}/readyz", timeout=5).status_code == 200
        for words in (["doctor"], ["workers"], ["rates"], ["audit"], ["export", "--worker", "w_1"]):
            print(Container(service, words, servers).run())
        for command in ("overlap", "route"):
            ask = ["kvatlas", command, "--model-id=demo", "--tokens=-"]
            code = f"import subprocess as s, sys; sys.exit(s.run({ask}, input='[1, 2, 3]', text=True).returncode)"
            Container(service, ["-c", code], servers, entrypoint=["python3"]).run()
        # as the pod's preStop does
        output("runc", "exec", drained.name, "sh", "-c", "kill -USR1 1")

        def draining() -> bool:
            return "draining" in Container(service, ["workers", "--json"], servers).run()

        until_sync(draining, what="a worker that drains")
        started = time.monotonic()
    print(f"a fleet of containers ended cleanly within {time.monotonic() - started:.0f} s")
