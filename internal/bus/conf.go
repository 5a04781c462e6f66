package bus

import (
	"fmt"
	"strings"
	"time"
)

// AccountsConf renders users and their permissions as the accounts block of a
// nats-server configuration file, for a cluster that is not embedded. Nobody
// else can log in to a server that has it, because there is no no_auth_user,
// unless callout is set: then identity lets in hosts, frontends, users and
// operators, which are left out.
func AccountsConf(users []User, callout *CalloutConfig) string {
	var b strings.Builder
	b.WriteString("# Generated from Berth's subject catalogue; do not edit.\n")
	users = callout.known(users)
	if callout != nil {
		keys := make([]string, 0, len(users))
		for _, u := range users {
			keys = append(keys, u.Public)
		}
		fmt.Fprintf(&b, "max_control_line: %d\nauthorization {\n  timeout: %d\n  auth_callout {\n    issuer: %s\n    account: %s\n    xkey: %s\n    auth_users: %s\n  }\n}\n",
			maxConnect, int(CalloutTime/time.Second), callout.Issuer, calloutAccount, callout.XKey, list(keys))
	}
	fmt.Fprintf(&b, "system_account: %s\naccounts {\n", systemAccount)
	for _, account := range []string{systemAccount, calloutAccount, appAccount} {
		fmt.Fprintf(&b, "  %s {\n", account)
		if account == appAccount {
			b.WriteString("    jetstream: enabled\n")
		}
		b.WriteString("    users: [\n")
		for _, u := range users {
			if accountOf(u.Caller) == account {
				u.conf(&b)
			}
		}
		b.WriteString("    ]\n  }\n")
	}
	b.WriteString("}\n")
	return b.String()
}

func (u User) conf(b *strings.Builder) {
	p := PermissionsOf(u.Caller)
	fmt.Fprintf(b, "      { # %s\n        nkey: %s\n        permissions {\n", u.Caller, u.Public)
	fmt.Fprintf(b, "          publish { allow: %s", list(p.Publish))
	if deny := p.server().Publish.Deny; len(deny) > 0 {
		fmt.Fprintf(b, ", deny: %s", list(deny))
	}
	fmt.Fprintf(b, " }\n          subscribe { allow: %s }\n", list(p.Subscribe))
	if p.Responses {
		fmt.Fprintf(b, "          allow_responses { max: 1, expires: %q }\n", fmt.Sprintf("%dm", int(responseTime/time.Minute)))
	}
	b.WriteString("        }\n      }\n")
}

func list(subjects []string) string {
	if len(subjects) == 0 {
		return "[]"
	}
	return `["` + strings.Join(subjects, `", "`) + `"]`
}
