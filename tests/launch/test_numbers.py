"""Time limits, ports and durations as literal numbers."""

import pytest
from credit_launch.ports import free_block, free_ports, job_port
from credit_launch.times import in_words, seconds_of


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("01:00:00", 3600),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_every_form_of_a_time_limit(limit, seconds):
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize("limit", ["", "1h", "1:2:3:4", "-5", "1-", "1.5", " 5", "0", "0:00"])
def test_what_is_no_time_limit(limit):
    with pytest.raises(ValueError, match="time = "):
        seconds_of(limit)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5.9, "5 s"), (65, "1 min 5 s"), (7800, "2 h 10 min"), (273600, "3 d 4 h")],
)
def test_durations_for_people(seconds, words):
    assert in_words(seconds) == words


@pytest.mark.parametrize(
    ("job", "base", "floor", "port"),
    [
        ("0", 10000, 32768, 10000),
        ("1", 10000, 32768, 10016),
        ("1249", 10000, 32768, 29984),
        ("1250", 10000, 32768, 10000),
        ("7", 2000, 9000, 2112),
        ("437", 2000, 9000, 2000),  # 7000 ports hold 437 jobs
        ("1", 10000, 9000, 10016),  # nothing below the floor: as if there were none
    ],
)
def test_ports_of_a_job(job, base, floor, port):
    assert job_port(job, base, floor) == port


def test_neighbouring_jobs_never_share_a_port_and_stay_below_the_floor():
    firsts = [job_port(str(job), 12000, 32768) for job in range(1000)]
    assert len(set(firsts)) == 1000
    assert min(firsts) >= 12000
    assert max(firsts) + 16 <= 32768


def test_a_block_in_use_is_passed_over():
    import socket

    base = free_block(20000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 3))
        taken.listen()
        assert free_block(base) >= base + 16
    assert len(set(free_ports(5))) == 5
