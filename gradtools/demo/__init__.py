"""The first real run: domain-adversarial training, one program on both frameworks.

A network learns to read clean digits, whose labels it sees, and has to read rotated, noised,
faintly inverted ones, whose labels it never sees. A second head tells the two domains apart;
its gradient is reversed on the way into the features, so that these become the same for both
(Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 17, 2016)::

    L(theta_f, theta_y, theta_d) = L_label(theta_f, theta_y) + L_domain(R(theta_f), theta_d),
    R(x) = x,  dR/dx = -scale

One evaluation of L gives every gradient. ``training.py`` is the program, written once for both
frameworks; with their own layers and optimisers the same stands in ``examples/``.
"""
