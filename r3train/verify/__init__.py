"""R3 in every topology, compared with two oracles that must also catch planted bugs.

``r3train verify`` runs one small batch with *given* routes through the production actor in each
topology and compares routes, forward, loss, gradients, optimizer steps and exported weights with
(a) the same actor at world size 1 and (b) a plain-PyTorch transformer that takes the routes as an
argument.  Named mutations of the production code must fail the same comparison.
"""
