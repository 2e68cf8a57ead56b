//go:build linux && !agentctl_omit_relay

package clientcmd

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/cli/clitest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/plugins/tickets"
)

// ticketRelay is a relay, and the tokens of people who use its tickets.
type ticketRelay struct {
	t      *testing.T
	url    string
	tokens map[string]string // token files: ann and bob may write, reader may read, eve is of another tenant
}

func newTicketRelay(t *testing.T) *ticketRelay {
	t.Helper()
	dir := t.TempDir()
	r, err := relay.Open(relay.Options{StateDir: filepath.Join(dir, "relay"), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	tr := &ticketRelay{t: t, url: r.URL(), tokens: map[string]string{}}
	for _, req := range []auth.MintRequest{
		{Class: "admin", Subject: "ann"}, {Class: "admin", Subject: "bob"}, {Class: "agent", Subject: "reader"}, {Class: "admin", Subject: "eve", Tenant: "other"},
	} {
		created, err := r.Store().Mint(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		tr.tokens[req.Subject] = filepath.Join(dir, req.Subject)
		if err := os.WriteFile(tr.tokens[req.Subject], []byte(created[0].Token), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	ready := make(chan struct{})
	r.OnReady(func() { close(ready) })
	wg.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { stop(); wg.Wait() })
	<-ready
	return tr
}

// with returns r for a subtest.
func (r *ticketRelay) with(t *testing.T) *ticketRelay { return &ticketRelay{t, r.url, r.tokens} }

// run runs 'agentctl tickets' with the token of a person, "" for none. It fails the test unless the
// command ends with code and what it prints has each of want.
func (r *ticketRelay) run(person string, code int, args []string, want ...string) (stdout string) {
	r.t.Helper()
	got, stdout, stderr := clitest.Run(r.t, NewTickets(), "from stdin\n", append(args, "--relay", r.url, "--token-file", r.tokens[person])...)
	if got != code {
		r.t.Fatalf("tickets %q by %q: exit %d, want %d: %s", args, person, got, code, stderr)
	}
	for _, w := range want {
		if !strings.Contains(stdout+stderr, w) {
			r.t.Errorf("tickets %q by %q: no %q in\n%s%s", args, person, w, stdout, stderr)
		}
	}
	return stdout
}

// create opens a ticket as ann and returns its id.
func (r *ticketRelay) create(args ...string) (id string) {
	r.t.Helper()
	return strings.TrimSpace(r.run("ann", cli.ExitOK, append([]string{"create"}, args...)))
}

// words splits a command line at its spaces; ID becomes the id of a ticket.
func words(line, id string) []string {
	return strings.Fields(strings.ReplaceAll(line, "ID", id))
}

// The tests share a relay: each has its own tickets.
func TestTickets(t *testing.T) {
	r := newTicketRelay(t)
	for _, tt := range []struct {
		name string
		test func(t *testing.T, r *ticketRelay)
	}{
		{"from creation to end", testTicketLife},
		{"refused", testTicketsRefused},
		{"approval", testTicketApproval},
	} {
		t.Run(tt.name, func(t *testing.T) { tt.test(t, r.with(t)) })
	}
}

// testTicketLife follows a ticket from its creation to its end. Each change prints the command that undoes
// it. A creation prints only the id on stdout, so that a script can keep it.
func testTicketLife(t *testing.T, r *ticketRelay) {
	r.run("ann", cli.ExitOK, words("ls", ""), "agentctl tickets create")
	r.run("ann", cli.ExitOK, words("create Disk --dry-run", ""), "nothing was done")
	id := r.create("Disk full", "--body-file", "-", "--priority", "high")
	lastPart := id[len(id)-6:]
	for _, step := range []struct {
		person, line string
		code         int
		want         []string
	}{
		{"ann", "ls", cli.ExitOK, []string{id, "open", "high", "Disk full"}},
		{"bob", "comment " + lastPart + " \x1b[31mred", cli.ExitOK, []string{"a comment stays"}},
		{"bob", "assign ID bob", cli.ExitOK, []string{"to bob", "agentctl tickets assign " + id + " -"}},
		{"bob", "move ID approved --dry-run", cli.ExitFailure, []string{"is open and cannot become approved", "in_progress"}},
		{"bob", "move ID waiting --dry-run", cli.ExitOK, []string{"tickets.transition", "nothing was done"}},
		{"bob", "move ID in_progress", cli.ExitOK, []string{"open -> in_progress", "agentctl tickets move " + id + " open --relay " + r.url + " --token-file " + r.tokens["bob"]}},
		{"bob", "move ID rejected", cli.ExitFailure, []string{"cannot become rejected", "open, waiting, resolved, closed"}},
		{"reader", "show " + strings.ToLower(id), cli.ExitOK, []string{"Disk full", "high", "bob", "from stdin", "?[31mred", "can become: open"}},
		{"ann", "ls", cli.ExitOK, []string{id, "in_progress", "bob"}},
		{"ann", "ls --status closed -o json", cli.ExitOK, []string{"[]"}},
		{"ann", "show ID -o yaml", cli.ExitOK, []string{"status: in_progress\n", "comment_count: 1\n"}},
		{"bob", "move ID resolved", cli.ExitOK, []string{"take it up again with: agentctl tickets move " + id + " open"}},
		{"bob", "move ID closed", cli.ExitOK, []string{"agentctl tickets move " + id + " open"}},
	} {
		r.run(step.person, step.code, words(step.line, id), step.want...)
	}
}

// testTicketsRefused: another tenant's ticket is refused like one that does not exist, and what is wrong
// with the command has its own exit code.
func testTicketsRefused(t *testing.T, r *ticketRelay) {
	id := r.create("Disk full")
	for _, tt := range []struct {
		name, person, line string
		code               int
		want               string
	}{
		{"a ticket of another tenant", "eve", "show ID", cli.ExitFailure, "no ticket has this id"},
		{"a part of its id", "eve", "show " + id[len(id)-6:], cli.ExitFailure, "no ticket has an id"},
		{"a token that may only read", "reader", "create x", cli.ExitUnauthorized, "--scope tickets:write"},
		{"no token", "", "ls", cli.ExitUnauthorized, "agentctl token create"},
		{"too short a part of an id", "ann", "show abc", cli.ExitUsage, "at least 4 characters"},
		{"an expiry without an approval", "ann", "create x --expires 5m", cli.ExitUsage, "--approval"},
		{"an expiry that the relay does not take", "ann", "create x --approval y --expires 500ms", cli.ExitFailure, "expires_in_s"},
		{"a status that does not exist", "ann", "ls --status nonsense", cli.ExitUsage, "use open, in_progress"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r.with(t).run(tt.person, tt.code, words(tt.line, id), tt.want)
		})
	}
}

// testTicketApproval: an approval is given by another person than the one who asked for it, and is final.
func testTicketApproval(t *testing.T, r *ticketRelay) {
	out := r.run("ann", cli.ExitOK, []string{"create", "Reboot attic", "--approval", "reboot attic now", "--expires", "15m", "-o", "json"}, "agentctl tickets reject ")
	var k client.Ticket
	if err := json.Unmarshal([]byte(out), &k); err != nil || k.Status != "pending" || k.Approval == nil {
		t.Fatalf("%s: %v", out, err)
	}
	// The 15 minutes count from the request; the ticket is created when the log has it on disk.
	if left := k.Approval.ExpiresAt - k.CreatedAt; left > 900_000 || left < 840_000 {
		t.Errorf("it expires %d ms after it was created, want 840,000 to 900,000", left)
	}
	for _, step := range []struct {
		person, line string
		code         int
		want         []string
	}{
		{"ann", "approve ID", cli.ExitUnauthorized, []string{"somebody else has to"}},
		{"bob", "ls --status pending -o ndjson", cli.ExitOK, []string{k.ID}},
		{"bob", "approve ID", cli.ExitOK, []string{"pending -> approved", "final"}},
		{"bob", "reject ID", cli.ExitFailure, []string{"stays so"}},
		{"ann", "show ID", cli.ExitOK, []string{"reboot attic now", "approved by bob", "can become: nothing"}},
	} {
		r.run(step.person, step.code, words(step.line, k.ID), step.want...)
	}
}

// The command knows the closed sets without the plugin, which the board build does not have.
func TestTicketWords(t *testing.T) {
	var statuses []string
	for _, s := range tickets.Statuses {
		statuses = append(statuses, string(s))
	}
	if !slices.Equal(client.TicketStatuses, statuses) || !slices.Equal(client.TicketPriorities, tickets.Priorities) {
		t.Errorf("the client knows %v and %v, the plugin %v and %v", client.TicketStatuses, client.TicketPriorities, statuses, tickets.Priorities)
	}
}
