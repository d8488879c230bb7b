"""Questions go before chunks, in the order asked, one at a time."""

import threading

from edgevlm.runtime.scheduler import Turnstile


def test_a_queued_question_goes_before_the_watcher_and_in_order():
    turnstile, order, inside = Turnstile(), [], threading.Event()
    release = threading.Event()

    def first_chunk():
        with turnstile.watcher():
            inside.set()
            release.wait()
            order.append("chunk 1")

    def second_chunk():
        with turnstile.watcher():
            order.append("chunk 2")

    def question(name, ticket):
        with turnstile.question(ticket):
            order.append(name)

    threads = [threading.Thread(target=first_chunk)]
    threads[0].start()
    inside.wait()
    tickets = [turnstile.queue(), turnstile.queue()]
    threads += [threading.Thread(target=second_chunk)]
    threads += [threading.Thread(target=question, args=(f"question {i}", tickets[i])) for i in (1, 0)]
    for thread in threads[1:]:
        thread.start()
    assert turnstile.waiting == 2
    release.set()
    for thread in threads:
        thread.join(5)
    assert order == ["chunk 1", "question 0", "question 1", "chunk 2"]


def test_an_error_inside_lets_the_next_one_in():
    turnstile = Turnstile()
    for _ in range(2):
        try:
            with turnstile.question(turnstile.queue()):
                raise ValueError
        except ValueError:
            pass
    with turnstile.watcher():
        assert turnstile.waiting == 0
