//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// fanoutServer is a server that sends each event to all subscribers.
type fanoutServer struct {
	name      string
	server    *process
	stop      func()
	addr      string
	subscribe [][]byte // the requests of subscribers, in rotation
	started   []byte   // what it is sent first
	mark      []byte   // once in each event
	// publish is how an event is published over HTTP. For a server that gets its events in
	// another way it is the zero value, and push takes an event or reports that it cannot yet.
	publish protocol
	push    func() bool
	// maxEvents is how many events the source of push may send in a round; 0: any number.
	maxEvents int
}

// fanoutLoad publishes events to a server and reads them as its subscribers, all in one thread.
type fanoutLoad struct {
	*fanoutServer
	*callers // that publish
	subs     map[int32]*subscription
	buf      []byte

	got    int         // events received, by all
	sentAt []time.Time // of each event since reset
	delay  []float64   // ms from publishing to each subscriber's reading
	timed  bool        // delays are recorded
}

// subscription is the connection of one subscriber.
type subscription struct {
	got  int
	tail []byte // what may be the beginning of a mark
}

// A saturated server has one event to send while it sends another: with more, it could join
// some into one write, as no server at its usual load does. Only peers get more, up to a bound,
// when they are not busy with two, since they may wait for their disk with each event.
const (
	inFlight    = 2
	maxInFlight = 8
)

// openFanout connects n subscribers and waits until all are subscribed.
func openFanout(s *fanoutServer, n int, next *int) (*fanoutLoad, error) {
	c, err := openCallers(s.publish, 0, next)
	if err != nil {
		return nil, err
	}
	l := &fanoutLoad{fanoutServer: s, callers: c, subs: make(map[int32]*subscription, n), buf: make([]byte, 256<<10)}
	for i := range n {
		fd, err := dialFD(s.addr)
		if err == nil {
			var in []byte
			in, err = exchange(fd, s.subscribe[i%len(s.subscribe)], func(in []byte) (bool, error) {
				if len(in) > 16 && !bytes.HasPrefix(in, []byte("HTTP/1.1 200")) {
					return true, fmt.Errorf("%.300q", in)
				}
				return bytes.Contains(in, s.started), nil
			})
			l.subs[int32(fd)] = &subscription{tail: l.tailOf(in)}
		}
		if err == nil {
			err = unix.EpollCtl(c.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
		}
		if err != nil {
			l.close()
			return nil, fmt.Errorf("subscriber %d: %w", i, err)
		}
	}
	return l, l.reset()
}

func (l *fanoutLoad) close() {
	for fd := range l.subs {
		closeFD(int(fd))
	}
	l.callers.close()
}

// reset reads until nothing has come for a tenth of a second, and begins to count anew.
func (l *fanoutLoad) reset() error {
	for quiet := time.Now(); time.Since(quiet) < 100*time.Millisecond; {
		n, err := l.receiveAll(50 * time.Millisecond)
		if err != nil {
			return err
		}
		if n > 0 {
			quiet = time.Now()
		}
	}
	for _, s := range l.subs {
		s.got = 0
	}
	l.got, l.sentAt, l.delay = 0, l.sentAt[:0], l.delay[:0]
	return nil
}

// receiveAll waits for input once, takes it, and returns how many connections had some.
func (l *fanoutLoad) receiveAll(wait time.Duration) (int, error) {
	var events [256]unix.EpollEvent
	n, err := l.wait(events[:], wait)
	for _, e := range events[:n] {
		if s := l.subs[e.Fd]; s != nil {
			err = errors.Join(err, l.read(int(e.Fd), s))
		} else if err = errors.Join(err, l.receive(l.byFD[e.Fd], l.buf)); l.err != nil {
			err = errors.Join(err, l.err) // an event that was not accepted is not waited for
		}
	}
	return n, err
}

// read counts the events in what a subscriber is sent.
func (l *fanoutLoad) read(fd int, s *subscription) error {
	k := copy(l.buf, s.tail)
	n, err := read(fd, l.buf[k:])
	if err != nil || n == 0 {
		return errors.Join(err, fmt.Errorf("%s ended a stream after %q", l.name, s.tail))
	}
	in := l.buf[:k+n]
	for range bytes.Count(in, l.mark) {
		if l.timed && s.got < len(l.sentAt) {
			l.delay = append(l.delay, time.Since(l.sentAt[s.got]).Seconds()*1000)
		}
		s.got++
		l.got++
	}
	s.tail = append(s.tail[:0], l.tailOf(in)...)
	return nil
}

// tailOf is the end of in that may be the beginning of a mark.
func (l *fanoutLoad) tailOf(in []byte) []byte { return in[max(0, len(in)-len(l.mark)+1):] }

// publishOne publishes an event, or reports that there is no way to at present.
func (l *fanoutLoad) publishOne() (bool, error) {
	if l.push != nil {
		if !l.push() {
			return false, nil
		}
		l.sentAt = append(l.sentAt, time.Now())
		return true, nil
	}
	if len(l.spare) == 0 {
		if len(l.byFD) == maxInFlight {
			return false, nil
		}
		if err := l.add(); err != nil {
			return false, err
		}
	}
	one := l.spare[len(l.spare)-1]
	l.spare = l.spare[:len(l.spare)-1]
	l.sentAt = append(l.sentAt, time.Now())
	return true, l.send(one)
}

// play publishes events until there were n (0: no bound) or d has passed (0: no bound), and waits
// until all subscribers have them: so many in flight at a time, and not more often than every.
func (l *fanoutLoad) play(n int, d time.Duration, inFlight int, every time.Duration) error {
	begin, first, progress, got := time.Now(), len(l.sentAt), time.Now(), l.got
	for {
		now := time.Now()
		sent := len(l.sentAt) - first
		more := (n == 0 || sent < n) && (d == 0 || now.Sub(begin) < d)
		missing := len(l.sentAt)*len(l.subs) - l.got
		if !more && missing <= 0 && len(l.spare) == len(l.byFD) {
			return nil
		}
		if l.got != got || missing == 0 {
			got, progress = l.got, now
		}
		if now.Sub(progress) > 10*time.Second {
			return fmt.Errorf("%s: %d subscribers miss %d events", l.name, len(l.subs), missing)
		}
		wait := 100 * time.Millisecond
		if more && missing <= (inFlight-1)*len(l.subs) {
			if wait = begin.Add(time.Duration(sent) * every).Sub(now); wait <= 0 {
				published, err := l.publishOne()
				if err != nil {
					return err
				}
				if !published {
					wait = time.Millisecond
				}
			}
		}
		if _, err := l.receiveAll(min(wait, 100*time.Millisecond)); err != nil {
			return err
		}
	}
}

// fanoutRound is one measurement of a server with its subscribers.
type fanoutRound struct {
	perCPU, busy, waited float64 // events received by subscribers for each CPU second of the server; shares of the core
	rate                 float64 // events received a second
	p99                  float64 // ms
	inFlight             int     // events, at most
}

// measureFanout plays for d, or until the source has sent all it may, with so many events in flight, or one every so often.
func (l *fanoutLoad) measureFanout(d time.Duration, inFlight int, every time.Duration) (fanoutRound, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := errors.Join(l.play(2, 0, inFlight, every), l.reset()); err != nil {
		return fanoutRound{}, err
	}
	l.timed = true
	defer func() { l.timed = false }()
	cpu, waited, at := l.server.cpu(), l.server.waited(), time.Now()
	if err := l.play(l.maxEvents, d, inFlight, every); err != nil {
		return fanoutRound{}, err
	}
	cpu, waited, wall := l.server.cpu()-cpu, l.server.waited()-waited, time.Since(at)
	return fanoutRound{perCPU: float64(l.got) / cpu.Seconds(), busy: float64(cpu) / float64(wall), waited: float64(waited) / float64(wall),
		rate: float64(l.got) / wall.Seconds(), p99: quantile(l.delay, 0.99), inFlight: inFlight}, nil
}

// fanoutSide is one kind of server in a comparison at one number of subscribers.
type fanoutSide struct {
	name             string
	start            func() (*fanoutServer, error)
	peer             bool // other people's: reported as absent when it cannot be measured
	saturated, paced []fanoutRound
	memory           []float64 // KiB of RSS a subscriber, after the load
	absent           error     // why it could not be measured
}

// alternateFanout measures all sides with subs subscribers in both ways, one server of each kind
// after another, in each round.
func (b *bench) alternateFanout(sides []*fanoutSide, subs int, d, every time.Duration) error {
	next := 0
	one := func(s *fanoutSide) error {
		f, err := s.start()
		if err != nil {
			return err
		}
		defer f.stop()
		warm, err := openFanout(f, 20, &next) // the server's first requests are not its subscribers' memory
		if err != nil {
			return err
		}
		err = warm.play(20, 0, 1, 0)
		warm.close()
		if err != nil {
			return err
		}
		b.sleep(100 * time.Millisecond)
		before := f.server.memory("VmRSS")
		l, err := openFanout(f, subs, &next)
		if err != nil {
			return err
		}
		defer l.close()
		saturated, err := l.measureFanout(d, inFlight, 0)
		for n := 2 * inFlight; err == nil && s.peer && n <= maxInFlight && saturation(saturated.busy, saturated.waited, b.shared) < minBusy; n *= 2 {
			saturated, err = l.measureFanout(d, n, 0)
		}
		if err != nil {
			return err
		}
		paced, err := l.measureFanout(d, maxInFlight, every)
		if err != nil {
			return err
		}
		s.saturated, s.paced = append(s.saturated, saturated), append(s.paced, paced)
		s.memory = append(s.memory, (f.server.memory("VmRSS")-before)/float64(subs))
		return nil
	}
	for range b.rounds {
		for _, s := range sides {
			if s.absent != nil || b.ctx.Err() != nil {
				continue
			}
			if err := one(s); err != nil {
				if !s.peer {
					return fmt.Errorf("%s: %w", s.name, err)
				}
				s.absent = err
			}
		}
	}
	for _, s := range sides {
		for _, way := range []struct {
			name   string
			rounds []fanoutRound
		}{{"saturated", s.saturated}, {"paced", s.paced}} {
			if len(way.rounds) > 0 {
				per := fanoutPerCPU(way.rounds)
				fmt.Printf("%-16s %5d subscribers, %-9s %7.0f events per CPU second, %7.0f/s, %d in flight, core %3.0f %% busy, waited for %3.0f %%, p99 %6.1f ms, RSS %4.1f KiB each; by round: %s\n",
					s.name, subs, way.name, median(per), medianOf(way.rounds, func(r fanoutRound) float64 { return r.rate }), way.rounds[0].inFlight,
					100*medianOf(way.rounds, func(r fanoutRound) float64 { return r.busy }), 100*medianOf(way.rounds, func(r fanoutRound) float64 { return r.waited }),
					medianOf(way.rounds, func(r fanoutRound) float64 { return r.p99 }), median(s.memory), list(per, "%.0f"))
			}
		}
	}
	return b.ctx.Err()
}

func fanoutPerCPU(rounds []fanoutRound) []float64 {
	return each(rounds, func(r fanoutRound) float64 { return r.perCPU })
}
