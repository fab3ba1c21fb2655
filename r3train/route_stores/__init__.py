"""--route-stores: routes are received, decoded and kept by the data-parallel leaders.

    rank 0:  sends every request through a store; its records hold a handle in the place of each row
    store:   forwards the request to the engine, keeps the rows of the answer, returns the rest
    leader:  is sent its microbatches with handles, fetches their rows from the stores, and sends the
             ranks of its data-parallel group their slices

A handle array is cut, merged, padded and packed like the rows that it stands for, so nothing outside
this folder knows which of the two it holds.  ``RouteStores`` implements ``loop.route_transport.Routes``.
"""
