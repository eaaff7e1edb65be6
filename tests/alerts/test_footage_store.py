"""Files of snapshots and clips: atomic, capped, aged, forgotten, on a disk that is full, and after a restart."""

import os
import shutil
import threading

import pytest
from footage_parts import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.alerts.clips.footage_store import FootageStore, StorageError
from cluster.errors import NotReadyError

DAY = 86_400.0
NOW = 1_900_000_000.0


def store_in(folder, **options):
    return FootageStore(folder, **{"max_bytes": 10_000, "retention_s": DAY, "keep_free": 0} | options)


def incident(number):
    return f"{number:016x}"


def put(store, number, data=b"x" * 100, *, camera="gate", kind="clip", at_s=NOW):
    draft = store.begin(camera, incident(number), kind, at_s)
    for at in range(0, len(data), 64):
        draft.write(data[at : at + 64])
    return draft.commit()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_kept_can_be_read_also_after_a_restart(tmp_path):
    store = store_in(tmp_path)
    stored = put(store, 1, b"a clip")
    put(store, 1, b"a picture", kind="snapshot")
    for each in (store, store_in(tmp_path)):
        found = each.find(incident(1), "clip")
        assert (found, found.media_type, found.size) == (stored, "video/mp4", 6)
        with each.open(found) as file:
            assert file.read() == b"a clip"
        assert each.find(incident(1), "snapshot").media_type == "image/jpeg"
        assert each.find(incident(1), "end") is None
        assert (len(each._files), each.bytes_stored) == (2, 15)


def test_nothing_is_seen_of_it_before_it_is_whole(tmp_path):
    store = store_in(tmp_path)
    draft = store.begin("gate", incident(1), "clip", NOW)
    draft.write(b"half of it")
    assert store.find(incident(1), "clip") is None
    assert store.bytes_stored == 10
    # The process dies here: another one finds nothing, and leaves nothing.
    again = store_in(tmp_path)
    assert (len(again._files), again.bytes_stored, files(tmp_path)) == (0, 0, [])


def test_one_that_is_given_up_leaves_nothing(tmp_path):
    store = store_in(tmp_path)
    draft = store.begin("gate", incident(1), "clip", NOW)
    draft.write(b"half of it")
    draft.abandon()
    draft.abandon()
    assert (store.bytes_stored, files(tmp_path)) == (0, [])
    with pytest.raises(StorageError):
        draft.write(b"more")
    assert store.bytes_stored == 0


def test_a_second_one_takes_the_place_of_the_first(tmp_path):
    store = store_in(tmp_path)
    put(store, 1, b"first", at_s=NOW)
    put(store, 1, b"the second", at_s=NOW)
    put(store, 1, b"third", at_s=NOW + 60)
    assert (len(store._files), store.bytes_stored, len(files(tmp_path))) == (1, 5, 1)


def test_the_oldest_make_room(tmp_path):
    store = store_in(tmp_path, max_bytes=1000)
    for number in range(20):
        put(store, number, at_s=NOW + number)
        assert store.bytes_stored <= 1000
    left = [number for number in range(20) if store.find(incident(number), "clip")]
    assert left == list(range(20 - len(left), 20))
    assert len(left) >= 9
    assert len(files(tmp_path)) == len(left)
    # A smaller cap holds from the next start on.
    assert store_in(tmp_path, max_bytes=300).bytes_stored <= 300


def test_a_clip_larger_than_all_is_refused(tmp_path):
    store = store_in(tmp_path, max_bytes=1000)
    put(store, 1)
    with pytest.raises(StorageError, match=r"clips\.max_bytes"):
        put(store, 2, b"x" * 2000)


def test_age_deletes_and_nothing_is_left(tmp_path):
    store = store_in(tmp_path)
    put(store, 1, at_s=NOW)
    put(store, 2, at_s=NOW + DAY / 2)
    held = store.open(store.find(incident(1), "clip"))
    assert store.sweep(NOW + DAY - 1).files == 0
    gone = store.sweep(NOW + DAY + 1)
    assert (gone.files, gone.bytes) == (1, 100)
    assert store.find(incident(1), "clip") is None
    assert len(files(tmp_path)) == 1
    # Whoever was reading it reads on; nobody else can begin.
    with held:
        assert len(held.read()) == 100
    # Also what an earlier process has written.
    assert store_in(tmp_path).sweep(NOW + 2 * DAY).files == 1
    assert files(tmp_path) == []


def test_a_camera_is_forgotten_and_the_others_are_not(tmp_path):
    store = store_in(tmp_path)
    odd = "Hof/../ Süd" + "é" * 120
    for number, camera in enumerate(["gate", "gate2", odd, "gate", odd]):
        put(store, number, camera=camera)
    draft = store.begin(odd, incident(9), "clip", NOW)
    draft.write(b"being made")
    gone = store.delete_camera(odd)
    assert (gone.files, gone.bytes) == (2, 200)
    for late in (lambda: draft.write(b"more"), draft.commit):
        with pytest.raises(StorageError, match="the camera was forgotten"):
            late()
    assert len(files(tmp_path)) == len(store._files) == 3
    assert store.bytes_stored == 300
    assert store.trouble == ""
    put(store, 5, at_s=NOW + 60)
    assert store.delete_camera("gate", begun_before_s=NOW + 30).files == 2
    assert store.find(incident(5), "clip") is not None


def test_what_cannot_be_deleted_is_said(tmp_path):
    store = store_in(tmp_path)
    stored = put(store, 1)
    (tmp_path / stored.name).unlink()
    # A folder of that name: nothing that unlink could remove.
    (tmp_path / stored.name).mkdir()
    with pytest.raises(StorageError, match="could not be deleted"):
        store.delete_camera("gate")


def test_a_deleted_file_is_missing_in_a_sentence(tmp_path):
    store = store_in(tmp_path)
    stored = put(store, 1)
    (tmp_path / stored.name).unlink()
    with pytest.raises(NotReadyError, match=f"the clip of incident {incident(1)} no longer exists"):
        store.open(stored)


def test_a_full_disk_is_said_and_leaves_nothing_half(tmp_path):
    store = store_in(tmp_path)
    draft = store.begin("gate", incident(2), "clip", NOW)
    with full_disk(100):
        draft.write(b"a" * 60)
        with pytest.raises(StorageError, match="the disk is full"):
            draft.write(b"b" * 60)
    assert (store.trouble, store.bytes_stored) == ("the disk is full", 60)
    # The parts before it are good; a file ends with one of them.
    with store.open(draft.commit()) as file:
        assert file.read() == b"a" * 60
    assert (store.trouble, store.bytes_stored) == ("the disk is full", 60)
    store.begin("gate", incident(3), "clip", NOW).commit()
    assert store.trouble == ""


def test_room_is_left_to_others(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    store = store_in(tmp_path, keep_free=free * 2)
    with pytest.raises(StorageError, match=r"the disk is full: less than clips\.keep_free = .* MiB is free"):
        store.begin("gate", incident(1), "clip", NOW)
    assert store.trouble.startswith("the disk is full")
    assert files(tmp_path) == []


def test_other_files_are_left_alone(tmp_path):
    for name in ("README", "0000000000000-x-y-clip.mp4", "1" * 13 + "-" + "a" * 16 + "-" + "b" * 16 + "-clip.jpg"):
        (tmp_path / name).write_text("mine")
    store = store_in(tmp_path)
    put(store, 1)
    store.sweep(NOW + 10 * DAY)
    store.delete_camera("gate")
    assert len(files(tmp_path)) == 3


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "half", "sweep", "forget", "again"]), st.integers(0, 5), st.integers(1, 400)),
        max_size=25,
    )
)
def test_whatever_is_done_the_index_is_the_folder(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("store")
    store, now_s = store_in(folder, max_bytes=1000), NOW
    for what, number, size in steps:
        now_s += 3600.0
        if what in ("put", "half"):
            draft = store.begin(f"camera-{number % 2}", incident(number), "clip", now_s)
            draft.write(b"x" * size)
            draft.abandon() if what == "half" else draft.commit()
        elif what == "sweep":
            store.sweep(now_s)
            assert all(each.at_ms >= (now_s - DAY) * 1000 for each in store._files.values())
        elif what == "forget":
            store.delete_camera(f"camera-{number % 2}")
        else:
            store = store_in(folder, max_bytes=1000)
        sizes = [entry.stat().st_size for entry in os.scandir(folder)]
        assert (len(store._files), store.bytes_stored) == (len(sizes), sum(sizes))
        assert store.bytes_stored <= 1000


def test_a_file_is_found_while_a_write_hangs(tmp_path, monkeypatch):
    """Event loops look for files: they must not wait for the disk."""
    store = store_in(tmp_path)
    stored = put(store, 1)
    hangs, ends = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        assert ends.wait(30)
        return 1 << 40

    monkeypatch.setattr(store, "free_bytes", hang)
    found = []
    look = threading.Thread(target=lambda: found.append(store.find(incident(1), "clip")), daemon=True)
    write = threading.Thread(target=lambda: put(store, 2), daemon=True)
    write.start()
    try:
        assert hangs.wait(30)
        look.start()
        look.join(10)
        assert found == [stored]
    finally:
        ends.set()
        write.join(30)
