"""What people do in the console, on a real cluster that begins with no camera: by pointer, by touch, by keyboard."""

import console_tasks
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_every_task_is_done_and_the_first_answer_comes_soon(tmp_path, chromium):
    with console_tasks.serve(tmp_path) as url:
        rows = console_tasks.do_tasks(chromium, url)
    assert not [row for row in rows if not row["done"]]
    for kind in console_tasks.KINDS:
        assert [row["task"] for row in rows if row["kind"] == kind][:2] == ["add a camera", "first answer"]
