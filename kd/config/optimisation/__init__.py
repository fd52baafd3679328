"""Parts of the section ``train``: the learning rate, and how a finished run goes on."""
