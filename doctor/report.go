// Package doctor examines an installation of agentctl on a board: its configuration, the
// daemon and its socket, the machine, and the connection to the relay. Each check returns
// findings, with the next step for each problem. It changes nothing.
//
//	report := doctor.Examine(ctx, doctor.Options{Socket: config.ClientSocket()})
//	for _, f := range report.Checks {
//		fmt.Println(f.Status, f.Name, f.Message, f.Next)
//	}
//
// When one check fails, the others still say what they see. The checks run side by side, so that a
// report takes as long as the slowest of them; the bound is resolveTimeout, checkTimeout and lateGrace
// together. A board that is in trouble is the usual case here: no network, a disk that hangs, a clock
// in 1970, a user without rights.
//
// A finding is for a person who did not build the system. Its message is what was seen, and
// its next step is a command or one thing to do.
//
// # Parts
//
// target.go reads the configuration as the daemon would and lists the checks. daemon.go, machine.go
// and relay.go have the checks of their subject. Most of them are in two: a checkX that asks the
// system, and an xFinding that turns the answer into a Finding and needs no system to test.
//
// Four checks depend on that of the daemon: state_dir, relay, join and token wait for its status,
// and go on without one when the daemon does not answer.
package doctor

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"agentctl/config"
	"agentctl/control"
)

// Status is the result of a check.
type Status string

// Statuses of a finding.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
	Skip Status = "skip" // the check does not apply, or this user may not see what it needs
)

// Finding is what one check found.
type Finding struct {
	Name    string `json:"name"`
	Status  Status `json:"status"`
	Message string `json:"message"`
	Next    string `json:"next,omitempty"` // the next step; set for each warning and failure
}

// Report is the result of Examine. Checks are in the order of target.checks, whichever check
// ended first; Warnings and Failures count the findings with these statuses.
type Report struct {
	Checks   []Finding `json:"checks"`
	Warnings int       `json:"warnings"`
	Failures int       `json:"failures"`
}

// Options select the installation to examine.
type Options struct {
	Socket     string          // of the daemon
	ConfigFile string          // "": the usual one of this user, or of the service for its socket
	Settings   config.Settings // replace those of the file: relay, token_file, ca_file, state_dir
	Version    string          // of this binary, to compare with the daemon's
	BuiltAt    time.Time       // build time, which the clock cannot precede; zero when unknown
}

// checkTimeout is how long all checks may take; they run at the same time.
//
// Within it every wait of a check is bounded by the context. System calls are not: statfs on a
// dead network mount does not return, so that runUntil leaves its goroutine behind.
const checkTimeout = 5 * time.Second

// lateGrace is how long a check may take to report that its context ended.
const lateGrace = 100 * time.Millisecond

// check is one check. names are the names of the findings that it may return; a check that
// does not return in time fails under all of them.
type check struct {
	names []string
	run   func(ctx context.Context) []Finding
}

// Examine runs all checks. A check that hangs in the kernel, such as on a dead network
// mount, keeps its goroutine: the process is expected to end soon.
func Examine(ctx context.Context, o Options) *Report {
	return runChecks(ctx, resolveUntil(ctx, o, resolveTimeout).checks(), checkTimeout)
}

// resolveTimeout bounds the time to read the configuration.
const resolveTimeout = 2 * time.Second

// resolveUntil is resolve with a bound: the saved settings are on the disk that may be the trouble.
// What the flags say is better than no report.
func resolveUntil(ctx context.Context, o Options, limit time.Duration) *target {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if cl, err := control.Dial(ctx, o.Socket); err == nil {
		err = cl.CheckDisk(ctx)
		_ = cl.Close()
		if err != nil { // a process that reads there cannot end
			return fallback(o, errors.New("not checked: the saved settings are on a disk that does not answer"))
		}
	}
	done := make(chan *target, 1)
	go func() { done <- resolve(o) }()
	select {
	case t := <-done:
		return t
	case <-ctx.Done():
		return fallback(o, errors.New("the files of the configuration cannot be read: no answer in time"))
	}
}

// runChecks runs the checks at the same time and reports their findings in the given order.
// Each goroutine writes its own element of found, so that they need no lock.
func runChecks(ctx context.Context, checks []check, limit time.Duration) *Report {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	found := make([][]Finding, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() { found[i] = c.runUntil(ctx) })
	}
	wg.Wait()
	return newReport(slices.Concat(found...))
}

// newReport counts findings.
func newReport(found []Finding) *Report {
	r := &Report{Checks: []Finding{}}
	for _, f := range found {
		switch f.Status {
		case Warn:
			r.Warnings++
		case Fail:
			r.Failures++
		}
		r.Checks = append(r.Checks, f)
	}
	return r
}

// runUntil runs the check and waits for it until shortly after ctx ends.
//
// Each check runs in a separate goroutine, so that a system call that does not return
// costs the report one finding and not the others.
func (c check) runUntil(ctx context.Context) []Finding {
	// The buffer lets a check that comes too late return without a receiver.
	done := make(chan []Finding, 1)
	go func() { done <- c.run(ctx) }()
	select {
	case findings := <-done:
		return findings
	case <-ctx.Done():
	}
	select {
	case findings := <-done:
		return findings
	case <-time.After(lateGrace):
	}
	findings := make([]Finding, len(c.names))
	for i, name := range c.names {
		findings[i] = fail(name, "no answer in time", "see the kernel's log for a device or mount that hangs: dmesg")
	}
	return findings
}

// one adapts a function that returns a single finding.
//
// Most checks have one finding; daemon and relay have several.
func one(fn func(context.Context) Finding) func(context.Context) []Finding {
	return func(ctx context.Context) []Finding { return []Finding{fn(ctx)} }
}

// ok, skip, warn and fail make findings. Only ok has no next step; that of skip may be empty.
func ok(name, message string) Finding         { return Finding{name, OK, message, ""} }
func skip(name, message, next string) Finding { return Finding{name, Skip, message, next} }
func warn(name, message, next string) Finding { return Finding{name, Warn, message, next} }
func fail(name, message, next string) Finding { return Finding{name, Fail, message, next} }
