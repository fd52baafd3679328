"""Models as their files hold them: which tensors, of which shapes, under which names."""
