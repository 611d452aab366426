"""A Keras callback that puts the memory of training into its logs."""

import keras

from checkmate_tf.bridge import measure


class MemoryUsage(keras.callbacks.Callback):
    """Adds `memory/peak_gb` to the logs of each epoch: the allocator's peak over its training steps, in 1e9 bytes.

        model.fit(x, y, callbacks=[checkmate_tf.MemoryUsage()])

    History, CSVLogger and TensorBoard take it from there. Everything on the device counts. On a device whose allocator keeps no
    statistics nothing is added.
    """

    def __init__(self):
        super().__init__()
        self._peak_bytes: int | None = None

    def on_epoch_begin(self, epoch, logs=None):
        """Forgets what came before: validation and other epochs."""
        self._peak_bytes = None
        if measure.measured_memory() is not None:
            measure.reset_peak()

    def on_train_batch_end(self, batch, logs=None):
        """Reads the peak after each step, as a planned step may reset it before the next."""
        memory = measure.measured_memory()
        if memory is not None:
            self._peak_bytes = max(memory[1], self._peak_bytes or 0)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the peak of the epoch's steps."""
        if logs is not None and self._peak_bytes is not None:
            logs["memory/peak_gb"] = self._peak_bytes / 1e9
