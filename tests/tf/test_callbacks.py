"""The callback that logs the memory of training."""

import checkmate_tf
from checkmate_tf.bridge import measure
from networks import conv_net, digits


def test_each_epochs_peak_is_in_the_history():
    model, (x, y) = conv_net(optimizer="sgd"), digits(32)
    needs = checkmate_tf.estimate(model, x[:16], y[:16], profile="cpu", verbose=0)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y), callbacks=[checkmate_tf.MemoryUsage()])
    peaks = history.history["memory/peak_gb"]
    assert len(peaks) == 2 and all(peak * 1e9 > needs.resident_bytes for peak in peaks)


def test_without_statistics_nothing_is_added(monkeypatch):
    monkeypatch.setattr(measure, "measured_memory", lambda: None)
    model, (x, y) = conv_net(optimizer="sgd"), digits(16)
    history = model.fit(x, y, batch_size=16, verbose=0, callbacks=[checkmate_tf.MemoryUsage()])
    assert "memory/peak_gb" not in history.history
