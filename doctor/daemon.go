package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"agentctl/config"
	"agentctl/control"
	"agentctl/daemon"
	"agentctl/duration"
	"agentctl/prober"
	"agentctl/term"
	"agentctl/transport/link"
)

// Next steps that several findings share.
const (
	joinGroup = "join the group: sudo usermod -aG " + control.Group + " $USER, then log in again"
	readLog   = "see its log: journalctl -u agentctl"
)

// checkDaemon asks the daemon for its status and for the readings of this machine. The
// status is in answer when it returns.
//
// One connection serves all questions, and everything about the daemon is reported here, so
// that a daemon that does not answer is one failure and not one for each question.
func (t *target) checkDaemon(ctx context.Context, answer *daemonAnswer) []Finding {
	// The close comes last, also after a failure: other checks wait for it.
	defer close(answer.done)
	cl, err := control.Dial(ctx, t.Socket)
	if errors.Is(err, control.ErrPermission) {
		return []Finding{fail("daemon", err.Error(), joinGroup)}
	}
	if err != nil {
		return []Finding{fail("daemon", err.Error(), "start it: agentctl run; as a service: sudo systemctl start agentctl, and see: journalctl -u agentctl")}
	}
	defer func() { _ = cl.Close() }()
	var s daemon.Status
	if err := cl.Status(ctx, &s); err != nil {
		return []Finding{fail("daemon", err.Error(), readLog)}
	}
	answer.status = &s
	found := []Finding{daemonFinding(&s, t.Version), samplingFinding(&s), linkFinding(&s), storageFinding(&s)}
	// The snapshot reads the optional modules now, also when the configuration leaves them out.
	snapshot, err := cl.Snapshot(ctx, "temperature", "power", "wear")
	if err != nil {
		return append(found, skip("power", "this daemon does not report it: "+err.Error(), ""))
	}
	r := &snapshot.ModuleReadings
	return append(found, powerFinding(r), heatFinding(r), wearFinding(r))
}

// daemonFinding compares the versions of the daemon and of this command, and reports a
// configuration that is not in force. An invalid configuration comes first: it hides what
// a restart would change.
//
// A difference of versions comes before changes that wait for a restart, because a restart
// settles both.
func daemonFinding(s *daemon.Status, version string) Finding {
	const name, restart = "daemon", "sudo systemctl restart agentctl, or however you run it"
	text := fmt.Sprintf("version %s, up %s", s.Version, time.Duration(s.UptimeS)*time.Second)
	switch c := s.Config; {
	case c != nil && c.Error != "":
		return fail(name, text+"; it uses an older configuration: "+config.WithQuotes(c.Error), "agentctl config validate")
	case s.Version != version:
		return warn(name, text+"; this command is "+version, restart)
	case c != nil && len(c.RestartNeeded) > 0:
		return warn(name, text+"; takes effect after a restart: "+strings.Join(c.RestartNeeded, ", "), restart)
	}
	return ok(name, text)
}

// samplingFinding reports the first thing that keeps readings from the history and from
// clients: no sample at all, a stop by a client, a module, the disk.
//
// A stop is a warning and not a failure: somebody asked for it. A module that fails or hangs
// is one too, because the other modules are still sampled.
func samplingFinding(s *daemon.Status) Finding {
	const name = "sampling"
	switch {
	case s.Sampling.LastError != "":
		return fail(name, "no sample: "+s.Sampling.LastError, readLog)
	case !s.Sampling.Running:
		return warn(name, "stopped: nothing is recorded or pushed", "agentctl start")
	}
	for _, m := range s.Sampling.ModuleStates {
		if m.State == "failing" || m.State == "hung" {
			return warn(name, fmt.Sprintf("module %s is %s: %s", m.Name, m.State, m.LastError), "see the kernel's log: dmesg; or leave it out: agentctl config set modules ...")
		}
	}
	if e := s.Sampling.DiskError; e != "" {
		return warn(name, e, "repair that mount, or measure another: agentctl config set disk_path PATH")
	}
	return ok(name, fmt.Sprintf("%s every %s", strings.Join(s.Sampling.Modules, ", "), duration.Format(time.Duration(s.Sampling.IntervalMS)*time.Millisecond)))
}

// linkFinding reports the state of the link. checkRelay and checkToken examine why a link is
// down.
//
// A token that two boards use comes first: each of them ends the link of the other, so that
// the state of the link says little.
//
// A link that is connecting is a warning: it may be up a moment later. With a relay
// configured, every other state that is not ready is a failure, also one that the daemon retries.
func linkFinding(s *daemon.Status) Finding {
	const name = "link"
	text := string(s.Link.State)
	if s.Link.Relay != "" {
		text += ", " + s.Link.Relay
	}
	if e := s.Link.LastError; e != nil && s.Link.State != link.StateReady {
		text += ": " + e.Message
	}
	switch {
	case s.CloneSuspected && s.Join != nil:
		return fail(name, text+"; another installation runs with a copy of this state directory", "on one of the two: agentctl leave, then join with a new invite")
	case s.CloneSuspected:
		return fail(name, text+"; another board uses the same token", "create a token for each board: agentctl token create --class device")
	case s.Link.State == link.StateDisabled:
		return skip(name, "no relay configured; this board works alone", "")
	case s.Link.State == link.StateReady:
		return ok(name, text)
	case s.Link.State == link.StateConnecting:
		return warn(name, text, "check again in a minute: agentctl status")
	case s.Link.LastError != nil && s.Link.LastError.Code == link.CloseDraining && strings.HasSuffix(s.Link.LastError.Message, " clock"):
		return fail(name, text+"; the clock of the relay's machine is wrong", "set it there, best by NTP: timedatectl set-ntp true; the relay's log says what is wrong with it")
	}
	return fail(name, text, "see the lines relay, join and token")
}

// storageFinding reports the history. Older daemons also answer disabled and memory.
//
// A degraded history is a failure although samples go on in memory: a restart loses them.
func storageFinding(s *daemon.Status) Finding {
	const name = "history"
	text := strings.TrimSpace(s.Storage.State + " " + s.Storage.Path)
	if s.Storage.Bytes > 0 {
		text += ", " + term.Bytes(uint64(s.Storage.Bytes))
	}
	switch s.Storage.State {
	case "off", "disabled":
		return skip(name, "no history is kept on disk", "")
	case "ok":
		return ok(name, text)
	case "memory":
		return warn(name, text+": what was recorded is lost at a restart", readLog)
	}
	if s.Storage.Detail != "" {
		text += ": " + s.Storage.Detail
	}
	if s.StateDir.IsOK() {
		return fail(name, text, s.Storage.Hint())
	}
	return fail(name, text, "see the line state_dir; recording resumes by itself")
}

// powerFinding reports the warnings of the firmware about supply and heat.
//
// The sensors come from the prober's catalogue: one without a warning text is a reading and
// not a flag of the firmware. Under-voltage comes before heat: it corrupts cards, and the
// firmware slows the CPU down for both.
//
// A machine that reports none of the flags gets a skip: most machines have no such firmware.
func powerFinding(r *prober.ModuleReadings) Finding {
	const name = "power"
	sample := &prober.Sample{Modules: r}
	known, warnings := false, []string(nil)
	for _, s := range prober.Sensors() {
		if s.Warning == "" {
			continue
		}
		v, isKnown := s.Read(sample)
		known = known || isKnown
		if v > 0 {
			warnings = append(warnings, s.Warning)
		}
	}
	text := strings.Join(warnings, ", ")
	switch {
	case !known:
		return skip(name, "this machine does not report its supply", "")
	case text == "":
		return ok(name, "good")
	case r.Power.UnderVoltage != nil && *r.Power.UnderVoltage:
		return warn(name, text, "use a stronger power supply and a short, thick cable: under-voltage damages cards")
	}
	return warn(name, text, "cool the board")
}

// heatFinding warns at the temperature at which a Raspberry Pi slows its CPU down.
//
// Other boards have other limits, but 80 degrees shortens the life of any of them. Heat is
// a warning only, because the board still works.
func heatFinding(r *prober.ModuleReadings) Finding {
	const name, hot = "temperature", 80 // degrees Celsius
	if r.Temperature == nil {
		return skip(name, "this machine has no sensor", "")
	}
	text := term.Value(r.Temperature.HottestC, "C")
	if r.Temperature.HottestC >= hot {
		return warn(name, text, "cool the board: a heat sink, air, a cooler place")
	}
	return ok(name, text)
}

// wearFinding reports the age of an eMMC: the part of its life that is used, and the state
// of its reserved blocks.
//
// The limits are those of JEDEC eMMC 5.0: PRE_EOL_INFO is normal, warning at 80 % of the
// reserved blocks, urgent at 90 %; the life time is an estimate of the maker in steps of 10 %.
func wearFinding(r *prober.ModuleReadings) Finding {
	const name, replace = "wear", "back up and replace the card"
	if r.Wear == nil || r.Wear.UsedPct == nil && r.Wear.PreEOL == "" {
		return skip(name, "this card does not report it (only eMMC does)", "")
	}
	text, used := "reserved blocks: "+r.Wear.PreEOL, 0.0
	if r.Wear.UsedPct != nil {
		used = *r.Wear.UsedPct
		text = fmt.Sprintf("%.0f %% of the card's life is used", used)
	}
	state := slices.Index(prober.EOLStates, r.Wear.PreEOL) // normal, warning, urgent
	switch {
	// An index of 2 is urgent. An unknown state has the index -1 and leaves the life to decide.
	case state >= 2, used >= 100:
		return fail(name, text, replace+" now")
	case state == 1, used >= 80:
		return warn(name, text, replace+" soon")
	}
	return ok(name, text)
}
