"""`kvatlas publish` as a child process."""

import signal

from kvatlas.embedded import ServerProcess
from tests.kvatlas_cli.conftest import UNUSED_ADDRESS, start_command


def test_a_publisher_told_to_drain_goes_on_until_it_is_stopped(nats_server: ServerProcess) -> None:
    worker = ("--engine", "vllm", "--worker-id", "qwen-2.5-x2x7k", "--model-id", "m")
    process = start_command(
        "publish", *worker, "--endpoint", f"tcp://{UNUSED_ADDRESS}", KVATLAS_NATS_URL=nats_server.url
    )
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout:
        assert any("worker qwen-2_5-x2x7k is published" in line for line in errors)
        process.send_signal(signal.SIGUSR1)
        assert any("worker qwen-2_5-x2x7k drains" in line for line in errors)
        process.terminate()
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 0
