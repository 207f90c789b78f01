from penstock.router.routing.placer import Pace


def test_so_many_recover_at_once_as_there_are_workers_for() -> None:
    pace = Pace(2)
    for request in range(6):
        pace.add(request)
    assert pace.release(0) == []
    assert pace.release(1) == [0, 1]
    assert pace.release(1) == []
    assert pace.release(2) == [2, 3]
    assert len(pace) == 2
    assert 4 in pace
    pace.discard(0)  # it has a token again
    assert pace.release(2) == [4]


def test_lost_again_while_it_recovers_it_takes_no_place() -> None:
    pace = Pace(1)
    pace.add(1)
    assert pace.release(1) == [1]
    pace.add(1)
    pace.add(2)
    assert pace.release(1) == [1]
    pace.discard(1)
    assert pace.release(1) == [2]


def test_what_ends_while_it_is_held_back_is_forgotten() -> None:
    pace = Pace(1)
    pace.add(1)
    pace.discard(1)
    assert pace.release(1) == []
