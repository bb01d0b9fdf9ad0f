import java.io.BufferedReader;
import java.io.InputStreamReader;
import org.apache.kafka.tools.ProducerPerformance;

/**
 * Runs Kafka's ProducerPerformance once for each line of standard input, which holds its arguments separated by tabs.
 *
 * One JVM for many runs: what it has compiled for the first is there for the next. After each run a line says how it
 * ended; end of input ends the program.
 */
public class RepeatedProducer {
    public static void main(String[] args) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String end = "run ended";
            try {
                ProducerPerformance.main(line.split("\t"));
            } catch (Exception error) {
                error.printStackTrace();
                end = "run failed";
            }
            System.out.println(end);
        }
    }
}
