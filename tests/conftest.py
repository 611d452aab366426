"""What must be set before TensorFlow is imported: the allocator whose statistics count every byte, oneDNN's kernels also on processors
where TensorFlow would not choose them (others want tens of megabytes of scratch for the smallest convolution), and a quiet log."""

import os
import signal
import tempfile

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The tests neither read nor write the profile that the user's own runs have cached.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="checkmate_tf_tests_")
# What a shell runs in the background ignores Ctrl-C, and some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
