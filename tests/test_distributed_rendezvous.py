"""Real sockets on localhost: each thread is a process of the run."""

import socket
import threading
import time

import pytest

from alibi_jax.distributed.rendezvous import LaunchError, rendezvous


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def call(processes, timeout=20.0, port=None, before=lambda port: None):
    """What each of (number, of how many, seconds that it comes late) hears; nothing if all came."""
    port = port or free_port()
    heard = {}

    def one(key, number, of, late):
        time.sleep(late)
        try:
            rendezvous(f"localhost:{port}", of, number, timeout)
            heard[key] = ""
        except LaunchError as error:
            heard[key] = str(error)

    threads = [
        threading.Thread(target=one, args=(key, *process)) for key, process in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    before(port)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [heard[key] for key in range(len(processes))]


@pytest.mark.parametrize(
    "processes",
    [
        [(0, 2, 0), (1, 2, 0)],
        [(0, 1, 0)],
        [(1, 3, 0), (2, 3, 0), (0, 3, 0.7)],
        [(0, 3, 0), (2, 3, 0.3), (1, 3, 0.6)],
    ],
)
def test_all_are_there_whoever_comes_first(processes):
    port = free_port()
    assert call(processes, port=port) == [""] * len(processes)
    # The port is free for JAX's coordinator.
    socket.create_server(("localhost", port)).close()


def test_who_is_missing_is_named_to_all():
    message = "processes 1, 3 of 5 did not start within 1 s: start all of them"
    heard = call([(0, 5, 0), (2, 5, 0), (4, 5, 0)], timeout=1.0)
    assert all(said.startswith(message) for said in heard)


def test_nobody_at_the_address():
    port = free_port()
    (heard,) = call([(1, 2, 0)], timeout=1.0, port=port)
    assert heard.startswith(f"process 1 of 2 found no process 0 at localhost:{port} within 1 s")


def test_one_started_twice():
    heard = call([(0, 3, 0), (1, 3, 0.2), (1, 3, 0.5)])
    assert heard == ["process 1 was started twice: give each another --process_id"] * 3


def test_one_that_was_started_again_counts_anew():
    def report_and_die(port):
        for _ in range(50):
            try:
                with socket.create_connection(("localhost", port)) as connection:
                    connection.sendall(b'{"process": 1, "of": 3}\n')
                    time.sleep(0.2)
                return
            except ConnectionRefusedError:
                time.sleep(0.05)

    assert call([(0, 3, 0), (1, 3, 1.0), (2, 3, 1.5)], before=report_and_die) == [""] * 3


def test_a_second_process_0():
    port = free_port()
    with socket.create_server(("", port)):
        (heard,) = call([(0, 2, 0)], port=port)
    assert heard.startswith(f"process 0 can't listen at port {port}")


def test_they_disagree_about_how_many_they_are():
    heard = call([(0, 2, 0), (1, 4, 0.2)])
    says = "process 1 was started as one of 4, process 0 as one of 2: give all the same"
    assert all(said.startswith(says) for said in heard)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"5\n"])
def test_who_else_knocks_is_not_counted(noise):
    def knock(port):
        for _ in range(50):
            try:
                with socket.create_connection(("localhost", port)) as connection:
                    connection.sendall(noise)
                return
            except ConnectionRefusedError:
                time.sleep(0.05)

    assert call([(0, 2, 0), (1, 2, 1.0)], before=knock) == ["", ""]
