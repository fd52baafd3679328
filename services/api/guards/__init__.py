"""The checks that every request passes before its route: host, origin, body size, key and rate.

The request log and the request metrics are kept here too, because they see the same requests.
"""
