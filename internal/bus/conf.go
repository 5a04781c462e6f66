package bus

import (
	"fmt"
	"strings"
	"time"
)

// AccountsConf renders users and their permissions as the accounts block of a
// nats-server configuration file, for a cluster that is not embedded. Nobody
// else can log in to a server that has it, because there is no no_auth_user.
func AccountsConf(users []User) string {
	var b strings.Builder
	b.WriteString("# Generated from Berth's subject catalogue; do not edit.\n")
	b.WriteString("system_account: SYS\naccounts {\n  SYS {}\n  APP {\n    jetstream: enabled\n    users: [\n")
	for _, u := range users {
		p := PermissionsOf(u.Caller)
		fmt.Fprintf(&b, "      { # %s\n        nkey: %s\n        permissions {\n", u.Caller, u.Public)
		fmt.Fprintf(&b, "          publish { allow: %s", list(p.Publish))
		if len(p.DenyPublish) > 0 {
			fmt.Fprintf(&b, ", deny: %s", list(p.DenyPublish))
		}
		fmt.Fprintf(&b, " }\n          subscribe { allow: %s }\n", list(p.Subscribe))
		if p.Responses {
			fmt.Fprintf(&b, "          allow_responses { max: 1, expires: %q }\n", fmt.Sprintf("%dm", int(responseTime/time.Minute)))
		}
		b.WriteString("        }\n      }\n")
	}
	b.WriteString("    ]\n  }\n}\n")
	return b.String()
}

func list(subjects []string) string {
	return `["` + strings.Join(subjects, `", "`) + `"]`
}
