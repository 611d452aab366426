"""The floor that knows TensorFlow: traces a step, reads it as a graph, prices it, and writes plans back."""
