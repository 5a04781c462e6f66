package main

import (
	"bytes"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/sdk"
)

// TestWhatIsSaidOfFrontendsAndAdministrators: names that an issuer or a
// person chose are quoted, so that they cannot write on the terminal.
func TestWhatIsSaidOfFrontendsAndAdministrators(t *testing.T) {
	acted := delegationOutOf([]sdk.ActedFor{
		{Frontend: "agent", Acting: "agent\x1b[31m", FirstAt: at.Add(-48 * time.Hour), LastAt: at.Truncate(time.Hour)},
		{Frontend: "web", FirstAt: at.Add(-48 * time.Hour), LastAt: at.Truncate(time.Hour), RevokedAt: at},
		{Frontend: "never", RevokedAt: at}})
	listed := adminSessionsOutOf([]sdk.AdminSession{{Handle: "habcdefghijklmnopqrstuvwxyz234567abcdefghijklmnopqrst", State: sdk.Active, Template: "default",
		Tier: sdk.GVisor, ChangedAt: at, Generation: "1-12"}})
	for name, print := range map[string]func(*app) error{
		"delegation-list": func(a *app) error { return a.print(acted, func() { a.renderDelegation(acted) }) },
		"admin-sessions":  func(a *app) error { return a.print(listed, func() { a.renderAdminSessions(listed) }) },
	} {
		for ext, json := range map[string]bool{"txt": false, "json": true} {
			var out bytes.Buffer
			if err := print(&app{stdout: &out, json: json}); err != nil {
				t.Fatal(err)
			}
			golden(t, name+"."+ext, out.Bytes())
		}
	}
	got := eventText(sdk.Event{Body: &identityv1.Attached{By: &corev1.Actor{Role: "administrator", Subject: "root"}, Reason: "ticket \x1b[31m", Verbs: []string{"read"},
		Until: timestamppb.New(at)}})
	if want := `the administrator "root" attached (read) until 05:06:07: "ticket \x1b[31m"`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
