"""The models of what goes over the wire between the API and its clients."""
