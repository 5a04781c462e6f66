package ids

var vectors = []struct{ key, issuer, tenant, subject, name, want string }{
	{"0000000000000000000000000000000000000000000000000000000000000000", "https://issuer.example", "acme", "user-1", "default", "sr6iwlzqi72g6dtuxqzhk63xdmgstmpw4mje2rpk5ajc2t7tcltyq"},
	{"ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "https://issuer.example", "acme", "user-1", "default", "s2ljlxiup3ad74enhog6t7pisbm2zrykqpinpx7lhx7etxsuqer7a"},
	{"0000000000000000000000000000000000000000000000000000000000000000", "https://issuer.example", "acme", "user-1", "work", "spgzkfptmrb5bcjvyrcagin47h7ijj5tpy2uau4vbzybzwfm2mp7q"},
	{"0000000000000000000000000000000000000000000000000000000000000000", "https://issuer.example/", "acme", "user-1", "default", "s4tphr2wlt6q7jsggkjqh6frsq66cjc3orlffkabvm7hw4xu5r2fq"},
	{"6b", "i", "t", "Zo\u00eb|\u0000 x", "n", "shm7yn7pw3vm6ng26mdm4kxlfnycub4q3vyzsuxi63sbtkdcuscrq"},
}
