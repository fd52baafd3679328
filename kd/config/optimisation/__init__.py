"""Parts of the section ``train``: the learning rate, and the loss scale of float16."""
