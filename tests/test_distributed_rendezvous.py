"""The rendezvous with real sockets on localhost; each thread acts as a process of the run."""

import socket
import threading
import time

import pytest

from alibi_jax.distributed.rendezvous import LaunchError, rendezvous


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def rendezvous_errors(processes, timeout=20.0, port=None, interfere=lambda port: None):
    """The error of each process, "" without one.

    `processes` are (number, number of processes, delay of the start in seconds). `interfere(port)`
    is called while they run.
    """
    port = port or free_port()
    errors = {}

    def run_process(key, number, num_processes, delay):
        time.sleep(delay)
        try:
            rendezvous(f"localhost:{port}", num_processes, number, timeout)
            errors[key] = ""
        except LaunchError as error:
            errors[key] = str(error)

    threads = [
        threading.Thread(target=run_process, args=(key, *process))
        for key, process in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    interfere(port)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [errors[key] for key in range(len(processes))]


@pytest.mark.parametrize(
    "processes",
    [
        [(0, 2, 0), (1, 2, 0)],
        [(0, 1, 0)],
        [(1, 3, 0), (2, 3, 0), (0, 3, 0.7)],
        [(0, 3, 0), (2, 3, 0.3), (1, 3, 0.6)],
    ],
)
def test_all_processes_meet_in_any_order_of_starts(processes):
    port = free_port()
    assert rendezvous_errors(processes, port=port) == [""] * len(processes)
    # The port is free for JAX's coordinator.
    socket.create_server(("localhost", port)).close()


def test_missing_processes_are_named_to_all():
    message = "processes 1, 3 of 5 did not start within 1 s: start all of them"
    errors = rendezvous_errors([(0, 5, 0), (2, 5, 0), (4, 5, 0)], timeout=1.0)
    assert all(error.startswith(message) for error in errors)


def test_no_process_0_at_the_address():
    port = free_port()
    (error,) = rendezvous_errors([(1, 2, 0)], timeout=1.0, port=port)
    assert error.startswith(f"process 1 of 2 found no process 0 at localhost:{port} within 1 s")


def test_a_process_started_twice_is_refused():
    errors = rendezvous_errors([(0, 3, 0), (1, 3, 0.2), (1, 3, 0.5)])
    assert errors == ["process 1 was started twice: give each process its own --process_id"] * 3


def test_a_restarted_process_replaces_its_first_report():
    def report_and_die(port):
        for _ in range(50):
            try:
                with socket.create_connection(("localhost", port)) as connection:
                    connection.sendall(b'{"process": 1, "num_processes": 3}\n')
                    time.sleep(0.2)
                return
            except ConnectionRefusedError:
                time.sleep(0.05)

    assert (
        rendezvous_errors([(0, 3, 0), (1, 3, 1.0), (2, 3, 1.5)], interfere=report_and_die)
        == [""] * 3
    )


def test_a_port_in_use_is_refused():
    port = free_port()
    with socket.create_server(("", port)):
        (error,) = rendezvous_errors([(0, 2, 0)], port=port)
    assert error.startswith(f"process 0 can't listen at port {port}")


def test_different_numbers_of_processes_are_refused():
    errors = rendezvous_errors([(0, 2, 0), (1, 4, 0.2)])
    message = "process 1 was started as one of 4, process 0 as one of 2: give the same"
    assert all(error.startswith(message) for error in errors)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"5\n"])
@pytest.mark.sample(2)
def test_other_clients_are_ignored(noise):
    def send_noise(port):
        for _ in range(50):
            try:
                with socket.create_connection(("localhost", port)) as connection:
                    connection.sendall(noise)
                return
            except ConnectionRefusedError:
                time.sleep(0.05)

    assert rendezvous_errors([(0, 2, 0), (1, 2, 1.0)], interfere=send_noise) == ["", ""]
