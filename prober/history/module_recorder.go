package history

import (
	"time"

	"agentctl/prober"
)

// moduleInterval is how often the readings of optional modules are recorded: with every
// sample they would double what is written to the card.
const moduleInterval = 10 * time.Second

// The sensors that are recorded as readings: in the order of the catalogue, by Record.ID,
// and their IDs by key. Memory and file hold the ID in place of the key.
var recordable, byID, idOf = recordableSensors()

func recordableSensors() (list []*prober.Sensor, byID [256]*prober.Sensor, idOf map[string]uint8) {
	idOf = map[string]uint8{}
	sensors := prober.Sensors()
	for i := range sensors {
		if s := &sensors[i]; s.Record.ID != 0 {
			list = append(list, s)
			byID[s.Record.ID] = s
			idOf[s.Key] = s.Record.ID
		}
	}
	return list, byID, idOf
}

// moduleRecorder makes readings of the optional modules of successive samples, while Record
// runs. What was not read anew since the last record is not recorded again.
type moduleRecorder struct {
	// at is Mono of the sample that was recorded last, 0 for none, and recorded are its
	// modules.
	at       time.Duration
	recorded prober.ModuleReadings

	// windowMS and counts are the sums over the Networks since the last record; counted is
	// the newest one that they include. A record is about all traffic since the one before, and
	// not only that of the newest Network.
	windowMS int64
	counts   map[*prober.Sensor]uint64
	counted  *prober.Network

	ready []prober.Reading
}

// record takes every sample and returns readings from time to time; they are valid until
// the next call.
func (m *moduleRecorder) record(x prober.Sample) []prober.Reading {
	if x.Modules == nil {
		return nil
	}
	if n := x.Modules.Network; n != nil && n != m.counted {
		m.count(n)
	}
	// A sample may come a little early: with no slack, every other one would be skipped at a
	// cadence of ten seconds.
	if m.at != 0 && x.Mono-m.at < moduleInterval-moduleInterval/20 {
		return nil
	}
	renewed := x.Modules.NewSince(&m.recorded)
	m.at, m.recorded, m.ready = x.Mono, *x.Modules, m.ready[:0]
	m.addCounts()
	for _, s := range recordable {
		if s.Record.Count != nil || !renewed.Has(s.Module) {
			continue
		}
		if v, known := s.Read(&x); known {
			m.add(s, v)
		}
	}
	return m.ready
}

// add appends to ready, whose array is reused.
func (m *moduleRecorder) add(s *prober.Sensor, v float64) {
	m.ready = append(m.ready, prober.Reading{Key: s.Key, Value: v})
}

// count adds a Network to the window. Those of successive samples do not overlap.
func (m *moduleRecorder) count(n *prober.Network) {
	if m.counts == nil {
		m.counts = map[*prober.Sensor]uint64{}
	}
	m.counted = n
	m.windowMS += n.WindowMS
	for _, s := range recordable {
		if s.Record.Count != nil {
			m.counts[s] += s.Record.Count(n)
		}
	}
}

// addCounts records what was counted, and begins a new window. Sums are left out while
// all of them are zero, as errors nearly always are.
func (m *moduleRecorder) addCounts() {
	if m.windowMS == 0 {
		return
	}
	var sums uint64
	for s, n := range m.counts {
		if !s.Record.PerSecond {
			sums += n
		}
	}
	for _, s := range recordable {
		switch n, counted := m.counts[s]; {
		case !counted:
		case s.Record.PerSecond:
			m.add(s, float64(n)*1000/float64(m.windowMS))
		case sums > 0:
			m.add(s, float64(n))
		}
	}
	clear(m.counts)
	m.windowMS = 0
}
