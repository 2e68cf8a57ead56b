package relaycmd

import (
	"strings"
	"testing"

	"agentctl/client"
	"agentctl/relay/auth"
)

// The line to paste has the address and the code, except for a code that is for many boards: other
// users of a machine can read the arguments of a process.
func TestJoinCommand(t *testing.T) {
	t.Parallel()
	pin := "ab12"
	for _, tt := range []struct {
		class    string
		uses     int
		url      string
		caSHA256 *string
		want     string
	}{
		{auth.InviteBoard, 1, "https://relay.example", nil, "sudo agentctl join https://relay.example CODE"},
		{auth.InviteBoard, 1, "https://10.0.0.5:8460", &pin, "sudo agentctl join https://10.0.0.5:8460 CODE --ca-sha256 ab12"},
		{auth.InviteBoard, 20, "https://relay.example", nil, "printf %s CODE | sudo agentctl join https://relay.example -"},
		{auth.InviteAgent, 1, "https://relay.example", nil, "agentctl login https://relay.example CODE"},
		{auth.InviteBoard, 1, "https://relay.example/a b", nil, "sudo agentctl join 'https://relay.example/a b' CODE"},
	} {
		inv := &client.NewInvite{Code: "CODE", URL: tt.url, CASHA256: tt.caSHA256, Invite: client.Invite{Class: tt.class, Uses: tt.uses}}
		if got := joinCommand(inv); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

// A board is given an address that it can use: not one of the relay's loopback, if there is another.
func TestJoinURL(t *testing.T) {
	t.Parallel()
	called := func(url string) inviteAdmin {
		c, err := client.New(client.Options{URL: url})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	local := &localInvites{}
	for _, tt := range []struct {
		name, flag, own string
		admin           inviteAdmin
		want, problem   string
	}{
		{"the flag wins", "https://a.example/", "https://b.example", local, "https://a.example", ""},
		{"the relay's own", "", "https://b.example", local, "https://b.example", ""},
		{"the relay's own, not the one that was called", "", "https://b.example", called("https://c.example"), "https://b.example", ""},
		{"the one that was called", "", "http://127.0.0.1:8460", called("https://c.example"), "https://c.example", ""},
		{"loopback, called on loopback", "", "http://127.0.0.1:8460", called("http://127.0.0.1:8461"), "http://127.0.0.1:8460", ""},
		{"loopback in the clear", "http://localhost:8460", "", local, "http://localhost:8460", ""},
		{"in the clear", "http://a.example", "", local, "", "use https://"},
		{"no URL", "a.example", "", local, "", "--url is not of the form"},
		{"a relay that has never run", "", "", local, "", "--url https://HOST:PORT"},
	} {
		got, err := joinURL(tt.flag, tt.own, tt.admin)
		if tt.problem != "" {
			if err == nil || !strings.Contains(err.Error(), tt.problem) {
				t.Errorf("%s: got %q, %v, want an error with %q", tt.name, got, err, tt.problem)
			}
		} else if err != nil || got != tt.want {
			t.Errorf("%s: got %q, %v, want %q", tt.name, got, err, tt.want)
		}
	}
}
