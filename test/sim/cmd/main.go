// Command cmd plays simulations: many seeds on all cores, or one with its whole trace.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/berth-dev/berth/test/sim"
)

func main() {
	seeds := flag.Int("seeds", 2000, "how many seeds to play")
	first := flag.Uint64("first", 1, "the first seed")
	seed := flag.Uint64("seed", 0, "play this seed alone and print its trace")
	mutation := flag.String("mutation", "", "switch this guard off")
	flag.Parse()
	debug.SetGCPercent(400)
	opt := sim.Options{Mutation: sim.Mutation(*mutation)}
	if *seed != 0 {
		opt.Trace = os.Stdout
		r := sim.Run(*seed, opt)
		fmt.Printf("seed %d: %d steps, %s, trace %016x\n", r.Seed, r.Steps, r.Virtual, r.Hash)
		if r.Broken != nil {
			fmt.Println(r.Broken)
			os.Exit(1)
		}
		return
	}
	began := time.Now()
	all := sim.Many(*first, *seeds, runtime.GOMAXPROCS(0), opt, os.Stdout)
	all.Hits.Print(os.Stdout)
	fmt.Printf("%d seeds from %d in %s: %d steps, %s of virtual time\n", all.Seeds, *first, time.Since(began).Round(time.Millisecond), all.Steps, all.Virtual.Round(time.Second))
	bad := len(all.Broken) > 0
	if missing := all.Hits.Missing(); len(missing) > 0 && *seeds >= 1000 {
		fmt.Println("never happened:", missing)
		bad = true
	}
	if bad {
		os.Exit(1)
	}
}
