//go:build linux && !agentctl_omit_relay

package clientcmd

import (
	"context"
	"encoding/json"
	"errors"
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
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/tickets"
)

// ticketRig is a relay with the tickets plugin, and the command line on it.
type ticketRig struct {
	t      *testing.T
	url    string
	tokens map[string]string // file by person
}

func newTicketRig(t *testing.T) *ticketRig {
	t.Helper()
	dir := t.TempDir()
	opt := relay.Options{StateDir: filepath.Join(dir, "relay"), Listen: "127.0.0.1:0"}
	opt.Plugins = append(opt.Plugins, func(k *kernel.Kernel) kernel.Plugin { return tickets.New(k, nil) })
	r, err := relay.Open(opt)
	if errors.Is(err, kernel.ErrAlreadyLoaded) { // the relay has it anyhow
		opt.Plugins = nil
		r, err = relay.Open(opt)
	}
	if err != nil {
		t.Fatal(err)
	}
	rig := &ticketRig{t: t, url: r.URL(), tokens: map[string]string{"": ""}}
	for _, m := range []auth.MintRequest{
		{Class: "admin", Subject: "ann"}, {Class: "admin", Subject: "bob"}, {Class: "agent", Subject: "reader"}, {Class: "admin", Subject: "eve", Tenant: "other"},
	} {
		minted, err := r.Store().Mint(t.Context(), m)
		if err != nil {
			t.Fatal(err)
		}
		rig.tokens[m.Subject] = filepath.Join(dir, m.Subject)
		if err := os.WriteFile(rig.tokens[m.Subject], []byte(minted[0].Token), 0o600); err != nil {
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
	return rig
}

// run runs `agentctl tickets` as a person, and wants an exit code.
func (r *ticketRig) run(person string, code int, args ...string) (stdout, stderr string) {
	r.t.Helper()
	args = append(args, "--relay", r.url, "--token-file", r.tokens[person])
	got, stdout, stderr := clitest.Run(r.t, NewTickets(), "from stdin\n", args...)
	if got != code {
		r.t.Fatalf("tickets %v: exit %d, want %d: %s", args, got, code, stderr)
	}
	return stdout, stderr
}

func (r *ticketRig) want(text string, words ...string) {
	r.t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			r.t.Errorf("%q is not in:\n%s", w, text)
		}
	}
}

func TestTicketsCommand(t *testing.T) {
	r := newTicketRig(t)
	_, errs := r.run("ann", cli.ExitOK, "ls")
	r.want(errs, "agentctl tickets create")
	_, errs = r.run("ann", cli.ExitOK, "create", "Disk full", "--dry-run")
	r.want(errs, "nothing was done")
	out, errs := r.run("ann", cli.ExitOK, "create", "Disk full", "--body-file", "-", "--priority", "high")
	id := strings.TrimSpace(out)
	r.want(errs, "created "+id, "agentctl tickets move "+id+" closed")

	tail := id[len(id)-6:]
	_, errs = r.run("bob", cli.ExitOK, "comment", tail, "on \x1b[31mit")
	r.want(errs, "a comment stays")
	_, errs = r.run("bob", cli.ExitOK, "assign", id, "bob")
	r.want(errs, "to bob", "agentctl tickets assign "+id+" -")
	_, errs = r.run("bob", cli.ExitFailure, "move", id, "approved", "--dry-run")
	r.want(errs, "is open and cannot become approved", "in_progress")
	_, errs = r.run("bob", cli.ExitOK, "move", id, "waiting", "--dry-run")
	r.want(errs, "tickets.transition", "nothing was done")
	_, errs = r.run("bob", cli.ExitOK, "move", id, "in_progress")
	r.want(errs, "open -> in_progress", "agentctl tickets move "+id+" open --relay "+r.url+" --token-file "+r.tokens["bob"])
	_, errs = r.run("bob", cli.ExitFailure, "move", id, "rejected")
	r.want(errs, "cannot become rejected", "open, waiting, resolved, closed")
	out, _ = r.run("reader", cli.ExitOK, "show", strings.ToLower(id))
	r.want(out, "Disk full", "high", "bob", "from stdin", "on ?[31mit", "can become: open")
	out, _ = r.run("ann", cli.ExitOK, "ls")
	r.want(out, id, "in_progress", "high", "bob", "Disk full")
	out, _ = r.run("ann", cli.ExitOK, "ls", "--status", "closed", "-o", "json")
	r.want(out, "[]")
	out, _ = r.run("ann", cli.ExitOK, "show", id, "-o", "yaml")
	r.want(out, "status: in_progress\n", "comment_count: 1\n")
	_, errs = r.run("bob", cli.ExitOK, "move", id, "resolved")
	r.want(errs, "take it up again with: agentctl tickets move "+id+" open")
	_, errs = r.run("bob", cli.ExitOK, "move", id, "closed")
	r.want(errs, "agentctl tickets move "+id+" open")

	// Somebody else's, nobody's, and what a token may not do.
	_, errs = r.run("eve", cli.ExitFailure, "show", id)
	r.want(errs, "no ticket has this id")
	_, errs = r.run("eve", cli.ExitFailure, "show", tail)
	r.want(errs, "no ticket has an id")
	_, errs = r.run("reader", cli.ExitUnauthorized, "create", "x")
	r.want(errs, "--scope tickets:write")
	r.run("", cli.ExitUnauthorized, "ls")
	r.run("ann", cli.ExitUsage, "show", "abc")
	r.run("ann", cli.ExitUsage, "create", "x", "--expires", "5m")
	_, errs = r.run("ann", cli.ExitUsage, "ls", "--status", "nonsense")
	r.want(errs, "use open, in_progress")
}

func TestTicketsApproval(t *testing.T) {
	r := newTicketRig(t)
	out, errs := r.run("ann", cli.ExitOK, "create", "Reboot attic", "--approval", "reboot attic now", "--expires", "15m", "-o", "json")
	var k client.Ticket
	if err := json.Unmarshal([]byte(out), &k); err != nil || k.Status != "pending" || k.Approval == nil {
		t.Fatalf("%s: %v", out, err)
	}
	// It counts from the request; the ticket is created when the log has it on disk.
	if left := k.Approval.ExpiresAt - k.CreatedAt; left > 900_000 || left < 840_000 {
		t.Errorf("it expires %d ms after it was created", left)
	}
	r.want(errs, "agentctl tickets reject "+k.ID)
	_, errs = r.run("ann", cli.ExitUnauthorized, "approve", k.ID)
	r.want(errs, "somebody else has to")
	out, _ = r.run("bob", cli.ExitOK, "ls", "--status", "pending", "-o", "ndjson")
	r.want(out, k.ID)
	_, errs = r.run("bob", cli.ExitOK, "approve", k.ID)
	r.want(errs, "pending -> approved", "final")
	_, errs = r.run("bob", cli.ExitFailure, "reject", k.ID)
	r.want(errs, "stays so")
	out, _ = r.run("ann", cli.ExitOK, "show", k.ID)
	r.want(out, "reboot attic now", "approved by bob", "can become: nothing")
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
