package test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/transport/link"
	"agentctl/transport/sse"
)

// The closed sets are those of the documents and docs/protocol.md states all of them: a new
// word is an amendment of both.
func TestVocabulary(t *testing.T) {
	t.Parallel()
	var kinds, verbs []string
	for _, k := range manifest.Kinds {
		kinds = append(kinds, k.Name+" "+k.Short+" "+string(k.Safety))
		for _, v := range k.Verbs {
			verbs = append(verbs, v.Name)
		}
	}
	var codes []string
	for _, c := range manifest.Codes {
		codes = append(codes, string(c))
	}
	types := []string{link.TypeHello, link.TypeAuth, link.TypeAuthOK, link.TypeAnnounce, link.TypeAnnounceAck, link.TypeMetric, link.TypeCmd,
		link.TypeCmdAck, link.TypeCmdCancel, link.TypeStreamEnd, link.TypeError}
	var streamCodes []string
	for c := sse.Code(0); c < 10000; c++ {
		if c.Reason() != "" {
			streamCodes = append(streamCodes, fmt.Sprint(int(c), " ", c.Reason()))
		}
	}
	for _, set := range []struct {
		name      string
		got, want []string
	}{
		{"kinds", kinds, []string{"system.disks sysdisk read_only", "system.doctor sysdoc read_only", "system.echo sysecho read_only",
			"system.history syshist read_only", "system.info sysinfo read_only", "system.journal sysjrnl read_only", "system.metrics sys read_only",
			"system.modules sysmod read_only", "system.network sysnet read_only", "system.processes sysproc read_only", "system.services syssvc read_only"}},
		{"verbs", verbs, []string{"get", "invoke", "list", "list", "list", "query", "query", "read", "run", "snapshot", "subscribe", "top"}},
		{"error codes", codes, []string{"E_BAD_REQUEST", "E_DEADLINE_EXCEEDED", "E_INTERNAL", "E_MANIFEST_INVALID", "E_NODE_OFFLINE", "E_RATE_LIMITED", "E_SAFETY_DENIED"}},
		{"scopes", manifest.Scopes, []string{"boards:inspect", "device:connect", "device:enroll", "events:ingest", "events:subscribe", "invites:write", "kernel:admin",
			"nodes:write", "tickets:read", "tickets:write", "tokens:write", "tools:call:read_only", "tools:list"}},
		{"stream closes", streamCodes, []string{"1000 normal", "4408 idle_timeout", "4413 backpressure", "4429 rate_limited", "4503 device_offline"}},
		{"envelopes", types, []string{"announce", "announce_ack", "auth", "auth_ok", "cmd", "cmd_ack", "cmd_cancel", "error", "hello", "metric", "stream_end"}},
	} {
		if !slices.Equal(sorted(set.got), set.want) {
			t.Errorf("%s are %v, want %v", set.name, sorted(set.got), set.want)
		}
	}
	b, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	for _, list := range [][]string{verbs, codes, manifest.Scopes, types, {link.Subprotocol, link.Subprotocol21, link.Path}} {
		for _, word := range list {
			if !strings.Contains(page, "`"+word+"`") && !strings.Contains(page, "`GET "+word+"`") {
				t.Errorf("docs/protocol.md does not state `%s`", word)
			}
		}
	}
	for _, c := range streamCodes {
		code, reason, _ := strings.Cut(c, " ")
		if !strings.Contains(page, "| "+code+" | "+reason+" |") {
			t.Errorf("docs/protocol.md does not state the stream's close %s", c)
		}
	}
	for _, code := range []int{link.CloseNormal, link.CloseGoingAway, link.CloseServiceRestart, link.CloseBadFrame, link.CloseAuthFailed, link.CloseForbidden,
		link.CloseTimeout, link.CloseSuperseded, link.CloseTooLarge, link.CloseManifestInvalid, link.CloseUpgradeRequired, link.CloseRateLimited, link.CloseDraining} {
		if !regexp.MustCompile(fmt.Sprintf(`(?m)^\|[ 0-9,]*\b%d\b[ 0-9,]*\|`, code)).MatchString(page) {
			t.Errorf("docs/protocol.md does not state the link's close %d", code)
		}
	}
}
